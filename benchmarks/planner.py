"""Predicted against measured step times: four models in layouts of up to four processes, measured in turns.

    python benchmarks/planner.py [--quick]

One thread per rank. Four processes share the cores of this machine, which the profile accounts for. A shared machine
changes its speed by a quarter within minutes, and a profile takes minutes, so times are compared relative to one
device, which is measured in turns with the others. The table has the absolute figures too.
"""

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track

from stretto import Layout, TrainConfig, Trainer, World, make_engine
from stretto.data import Corpus, Lanes, prepare_text
from stretto.measure.profile import measure_profile
from stretto.measure.workload import find_workload
from stretto.nn import LSTM, CrossEntropy, Embedding, Linear, Stack
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.predict import predict
from stretto.plan.profile import Profile
from stretto.plan.search import balance, find_plan
from stretto.plan.workload import Workload
from stretto.train.named_optimizer import optimizer_factory
from timing import WIKITEXT, show

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.rank_pool import RankPool

TRAIN = TrainConfig(steps=10**6)


@dataclass(frozen=True)
class Shape:
    """The model and batch to train."""

    name: str
    layers: int
    hidden: int
    lanes: int
    window: int
    symbols: int  # vocabulary of embedding and softmax, which may exceed the text's

    def model(self) -> Stack:
        layers = [LSTM(self.hidden, self.hidden) for _ in range(self.layers)]
        return Stack([Embedding(self.symbols, self.hidden), *layers, Linear(self.hidden, self.symbols)])


SHAPES = [
    Shape("narrow and deep", 8, 128, 32, 128, 256),
    Shape("wide and shallow", 2, 1024, 16, 32, 256),
    Shape("words", 4, 768, 16, 48, 30_000),
    Shape("tiny", 2, 32, 4, 16, 256),
]
LONG = Shape("words, long windows", 4, 768, 16, 256, 30_000)
CUTS = {
    "narrow and deep": ((1, 1, 1), (2, 1, 1), (1, 2, 4), (1, 2, 8), (4, 1, 1), (2, 2, 8), (1, 4, 8)),
    "wide and shallow": ((1, 1, 1), (2, 1, 1), (1, 2, 2), (1, 2, 4), (4, 1, 1), (2, 2, 4)),
    "words": ((1, 1, 1), (2, 1, 1), (1, 2, 2), (1, 2, 4), (4, 1, 1), (2, 2, 4)),
    # One device is fastest here, and the planner should say so.
    "tiny": ((1, 1, 1), (2, 1, 1), (1, 2, 2)),
}
# Each rank keeps its trainers between turns.
_TRAINERS: dict[tuple[str, str], Trainer] = {}


def feed(corpus: Path, shape: Shape) -> Lanes:
    return Lanes(Corpus.open(corpus), shape.lanes, shape.window)


def measure(world: World, corpus: Path, shape: Shape) -> Profile:
    """Measure the profile of a shape on all ranks."""
    with torch.device("meta"):
        model = shape.model()
    optimizer = optimizer_factory(TRAIN)
    return measure_profile(model, CrossEntropy(), feed(corpus, shape), world=world, optimizer=optimizer, threads=1)


def take_turn(world: World, corpus: Path, shape: Shape, layout: Layout, steps: int) -> float:
    """Train some steps and return their median seconds."""
    key = shape.name, layout.model_dump_json()
    if key not in _TRAINERS:
        with torch.device("meta"):
            model = shape.model()
        engine = make_engine(model, CrossEntropy(), layout, world, seed=1)
        _TRAINERS[key] = Trainer(engine, feed(corpus, shape), TRAIN)
        _TRAINERS[key].advance()
    if world.size > 1:
        dist.barrier()
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        _TRAINERS[key].advance()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def layouts_of(shape: Shape, profile: Profile, workload: Workload) -> list[Layout]:
    """The layouts to compare, each with the planner's partition."""
    return [
        balance(profile, workload, Cluster(4), Layout(replicas=replicas, stages=stages, chunks=chunks))
        for replicas, stages, chunks in CUTS[shape.name]
    ]


@dataclass(frozen=True)
class Row:
    """One layout of one shape."""

    shape: str
    layout: Layout
    predicted: float
    measured: float
    is_chosen: bool
    drift: float  # how much slower the machine is than during profiling: measured / predicted of one device

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured

    @property
    def ratio_without_drift(self) -> float:
        return self.ratio * self.drift


def run_shape(shape: Shape, corpus: Path, rounds: int) -> tuple[list[Row], float]:
    """Predict and measure one shape; return its rows, and the gain of the partition for a large softmax."""
    Console(stderr=True).print(f"{shape.name}: measuring the profile")
    ranks = {size: RankPool(size) for size in (1, 2, 4)}
    profile = ranks[4].run(measure, corpus, shape, seconds=300)[0]
    workload = find_workload(feed(corpus, shape))
    cluster = Cluster(4)
    chosen = find_plan(profile, workload, cluster).chosen.layout
    layouts = layouts_of(shape, profile, workload)
    if chosen not in layouts:
        layouts.append(chosen)
    costs = CostModel(profile)
    predicted = [predict(costs, workload, layout, cluster).seconds for layout in layouts]
    measured = take_turns(ranks, corpus, shape, layouts, rounds, steps=max(1, round(0.6 / max(predicted))))
    gain = partition_gain(ranks, corpus, profile) if shape.name == "words" else 0.0
    for pool in ranks.values():
        pool.close()
    # The first layout is one device.
    drift = measured[0] / predicted[0]
    rows = [
        Row(shape.name, layout, predicted_seconds, seconds, layout == chosen, drift)
        for layout, predicted_seconds, seconds in zip(layouts, predicted, measured, strict=True)
    ]
    return rows, gain


def take_turns(
    ranks: dict[int, RankPool], corpus: Path, shape: Shape, layouts: list[Layout], rounds: int, steps: int
) -> list[float]:
    """Run the layouts in turns and return the minimum seconds of each; other work on the machine only adds time."""
    turns: list[list[float]] = [[] for _ in layouts]
    console = Console(stderr=True)
    for index in track(range(rounds), f"{shape.name}: taking turns", console=console, transient=True):
        order = range(len(layouts)) if index % 2 else reversed(range(len(layouts)))
        for number in order:
            layout = layouts[number]
            times = ranks[layout.num_ranks].run(take_turn, corpus, shape, layout, steps, seconds=120)
            turns[number].append(max(times))
    return [min(times) for times in turns]


def partition_gain(ranks: dict[int, RankPool], corpus: Path, profile: Profile) -> float:
    """The speed of the planner's partition relative to equal numbers of blocks: two stages, long windows."""
    cut = Layout(stages=2, chunks=8)
    ours = balance(profile, find_workload(feed(corpus, LONG)), Cluster(2), cut)
    equal = cut.model_copy(update={"blocks": (3, 3)})
    ours_seconds, equal_seconds = take_turns(ranks, corpus, LONG, [ours, equal], 4, steps=1)
    print(f"{LONG.name}: blocks {ours.blocks} {ours_seconds:.2f} s, blocks {equal.blocks} {equal_seconds:.2f} s")
    return equal_seconds / ours_seconds


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Return Spearman's rank correlation."""
    places = [[sorted(values).index(value) for value in values] for values in (first, second)]
    return statistics.correlation(*places)


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted against measured step times.")
    parser.add_argument("--quick", action="store_true", help="two shapes, fewer rounds")
    parser.add_argument("--shape", help="only this shape")
    options = parser.parse_args()
    shapes = [shape for shape in SHAPES if options.shape in (None, shape.name)]
    if options.quick and not options.shape:
        shapes = [shapes[0], shapes[-1]]
    rows: list[Row] = []
    gain = 0.0
    with tempfile.TemporaryDirectory() as folder:
        prepare_text([WIKITEXT / "valid.txt"], Path(folder) / "bytes")
        for shape in shapes:
            shape_rows, shape_gain = run_shape(shape, Path(folder) / "bytes", 3 if options.quick else 9)
            rows += shape_rows
            gain = max(gain, shape_gain)
    over_best = [row.measured / min(other.measured for other in rows if other.shape == row.shape) for row in rows]
    # One device is the baseline.
    several = [row for row in rows if row.layout.num_ranks > 1]
    tiny = [row for row in rows if row.shape == "tiny"]
    show(
        "predicted against measured, one thread per rank",
        ["shape", "layout", "blocks", "predicted ms", "measured ms", "ratio", "without drift", ""],
        [
            [
                row.shape,
                str(row.layout).split(" (")[0],
                "|".join(map(str, row.layout.blocks)),
                f"{row.predicted * 1e3:.1f}",
                f"{row.measured * 1e3:.1f}",
                f"{row.ratio:.2f}",
                f"{row.ratio_without_drift:.2f}" if row.layout.num_ranks > 1 else "",
                "chosen" if row.is_chosen else "",
            ]
            for row in rows
        ],
        {
            "layouts": len(several),
            "within_15_percent": sum(abs(row.ratio_without_drift - 1) <= 0.15 for row in several),
            "within_15_percent_with_drift": sum(abs(row.ratio - 1) <= 0.15 for row in rows),
            "rank_correlation": rank_correlation([row.predicted for row in rows], [row.measured for row in rows]),
            "chosen_over_best": max(over for row, over in zip(rows, over_best, strict=True) if row.is_chosen),
            "partition_gain": gain,
            # For the tiny model the planner chooses one device, and one device is fastest.
            "one_device_wins": float(
                bool(tiny)
                and all(row.is_chosen == (row.layout.num_ranks == 1) for row in tiny)
                and min(tiny, key=lambda row: row.measured).layout.num_ranks == 1
            ),
        },
    )


if __name__ == "__main__":
    main()
