"""Predicted against measured step times: five models in layouts of up to four processes, measured in turns.

    python benchmarks/planner.py [--quick] [--try N]

The planner tries the layouts that it predicts to be fastest. `chosen_over_best` is the time of the layout that it
chooses after that, relative to the fastest one; `predicted_over_best` is that of the layout that it would choose by
prediction alone. For these two figures the finalists, and all that came close, are measured again, in turns, until it
seems clear that the chosen one takes at most 1.03 times as long, or a minute is over. `measured_over_best` is that of
the layout that was fastest in the first measurement: it shows how far two measurements of the same layouts disagree.
A full run takes 10 to 15 minutes: the number of rounds depends on the time of a step.

The best of several layouts is partly the luckiest one, so `chosen_over_best` is above 1 even if all are equally fast.
`chosen_over_best_if_equal` is what it would be, in a typical run with this noise, if those that are not clearly slower
than the chosen one were as fast as it; one run in twenty would be above `chosen_over_best_if_equal_at_most`. Both are
estimated by bootstrap: rounds are resampled with replacement. The bounds in the table are those of one median, with
95 % confidence; among so many medians, some are outside.

One thread per rank. Four processes share the cores of this machine, which the profile accounts for. A shared machine
changes its speed by a quarter within minutes, and a profile takes minutes, so times are compared relative to one
device, which is measured in turns with the others: a ratio of measured times is the median of those of each round. The
table has the absolute figures too, as medians.
"""

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from paused_pools import PausedPools
from stretto import Layout, TrainConfig, Trainer, World, make_engine
from stretto.blocks.losses import Loss
from stretto.data import Batches, Corpus, Lanes, from_arrays, prepare_text
from stretto.measure.profile import measure_profile
from stretto.measure.profile_input import ProfileInput
from stretto.measure.timing import median_bounds, median_ratio
from stretto.measure.workload import find_workload
from stretto.nn import LSTM, BidirectionalLSTM, CrossEntropy, Embedding, Linear, SquaredError, Stack
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.finalists import choose_by_trials, find_finalists
from stretto.plan.one_layout import balance
from stretto.plan.predict import predict
from stretto.plan.profile import Profile
from stretto.plan.search import Plan, find_plan
from stretto.plan.trial import Finalist, Trial
from stretto.plan.workload import Workload
from stretto.planning.trial_runs import try_layouts
from stretto.train.named_optimizer import optimizer_factory
from stretto.windows.loader import WindowSource
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
    symbols: int  # vocabulary of embedding and softmax, which may exceed the text's; 0 for a bidirectional regression

    @property
    def is_causal(self) -> bool:
        return self.symbols > 0

    def model(self) -> Stack:
        if self.is_causal:
            layers = [LSTM(self.hidden, self.hidden) for _ in range(self.layers)]
            return Stack([Embedding(self.symbols, self.hidden), *layers, Linear(self.hidden, self.symbols)])
        sizes = [self.hidden, *[2 * self.hidden] * (self.layers - 1)]
        return Stack([*(BidirectionalLSTM(size, self.hidden) for size in sizes), Linear(2 * self.hidden, 1)])

    def loss(self) -> Loss:
        return CrossEntropy() if self.is_causal else SquaredError()

    def windows(self, corpus: Path) -> WindowSource:
        """Lanes of text or, as a model that looks ahead can't use them, batches of random numbers."""
        if self.is_causal:
            return Lanes(Corpus.open(corpus), self.lanes, self.window)
        numbers = np.random.default_rng(1).standard_normal((8 * self.lanes, self.window, self.hidden), np.float32)
        return Batches(from_arrays(numbers, numbers[..., :1]), max_rows=self.lanes)

    def workload(self, corpus: Path) -> Workload:
        return find_workload(self.windows(corpus), is_causal=self.is_causal)


ONE, TWO_REPLICAS, FOUR_REPLICAS = Layout(), Layout(replicas=2), Layout(replicas=4)
SHAPES = {
    Shape("narrow and deep", 8, 128, 32, 128, 256): (
        ONE, TWO_REPLICAS, Layout(stages=2, chunks=4), Layout(stages=2, chunks=8),
        Layout(stages=2, chunks=6, interleave=2), FOUR_REPLICAS, Layout(replicas=2, stages=2, chunks=8),
        Layout(stages=4, chunks=8),
    ),
    Shape("wide and shallow", 2, 1024, 16, 32, 256): (
        ONE, TWO_REPLICAS, Layout(stages=2, chunks=2), Layout(stages=2, chunks=4),
        Layout(stages=2, chunks=4, interleave=2), FOUR_REPLICAS, Layout(replicas=2, stages=2, chunks=4),
    ),
    Shape("words", 4, 384, 16, 32, 10_000): (
        ONE, TWO_REPLICAS, Layout(stages=2, chunks=2), Layout(stages=2, chunks=4),
        Layout(stages=2, chunks=4, interleave=2), FOUR_REPLICAS, Layout(replicas=2, stages=2, chunks=4),
    ),
    Shape("bidirectional", 3, 192, 4, 192, 0): (
        ONE, TWO_REPLICAS, Layout(spans=2), Layout(stages=2, micro_batches=2), FOUR_REPLICAS,
        Layout(replicas=2, spans=2), Layout(spans=4, micro_batches=2),
    ),
    # One device is fastest here, and the planner should say so.
    Shape("tiny", 2, 32, 4, 16, 256): (ONE, TWO_REPLICAS, Layout(stages=2, chunks=2)),
}  # fmt: skip
LONG = Shape("words, long windows", 4, 384, 16, 128, 10_000)
# Layouts whose first measurement is within this factor of the fastest are measured again.
RIVAL_FACTOR = 1.15
# The seconds that the measurements of a shape should take, and the most rounds of the first. After each DROP_ROUNDS
# rounds of the second, layouts leave if the chosen one takes at most CLOSE times as long, by the bound of the median.
FIRST_SECONDS, FIRST_ROUNDS, SECOND_SECONDS = 15.0, 6, 60.0
DROP_ROUNDS, CLOSE = 4, 1.03
NUM_RESAMPLES = 500
QUICK_ROUNDS = 3
COLUMNS = [
    "shape", "layout", "blocks", "predicted ms", "measured ms", "ratio", "without drift", "trial ms", "trial steps",
    "again ms", "",
]  # fmt: skip
# Each rank keeps its trainer between turns.
_TRAINERS: list[Trainer] = []


def measure(world: World, corpus: Path, shape: Shape) -> Profile:
    """Measure the profile of a shape on all ranks."""
    with torch.device("meta"):
        model = shape.model()
    optimizer = optimizer_factory(TRAIN)
    windows = shape.windows(corpus)
    return measure_profile(model, shape.loss(), windows, world=world, optimizer=optimizer, threads=1)


def try_finalists(world: World, corpus: Path, shape: Shape, finalists: tuple[Finalist, ...]) -> tuple[Trial, ...]:
    """Try the finalists of a plan, as `layout = "auto"` does."""
    with torch.device("meta"):
        model = shape.model()
    windows, optimizer = shape.windows(corpus), optimizer_factory(TRAIN)
    profile_input = ProfileInput(model, shape.loss(), windows, optimizer, world.device, threads=1)
    return try_layouts(profile_input, world, finalists)


def take_turn(world: World, corpus: Path, shape: Shape, layout: Layout, steps: int) -> float:
    """Train some steps and return their median seconds."""
    if not _TRAINERS:
        with torch.device("meta"):
            model = shape.model()
        engine = make_engine(model, shape.loss(), layout, world, seed=1)
        _TRAINERS.append(Trainer(engine, shape.windows(corpus), TRAIN))
        _TRAINERS[0].advance()
    if world.size > 1:
        dist.barrier()
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        _TRAINERS[0].advance()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def layouts_of(shape: Shape, profile: Profile, workload: Workload) -> list[Layout]:
    """The layouts to compare, each with the planner's partition."""
    return [balance(profile, workload, Cluster(4), layout) for layout in SHAPES[shape]]


@dataclass(frozen=True)
class Row:
    """One layout of one shape."""

    shape: str
    layout: Layout
    predicted: float
    measured: list[float]  # seconds in each round
    baseline: list[float]  # those of one device, in the same rounds
    predicted_baseline: float
    is_chosen: bool  # after trying the finalists
    is_predicted: bool  # the choice by prediction alone
    trial: Trial | None  # if the layout was tried
    again: list[float] | None  # seconds in each round of the second measurement, if the layout was in it

    @property
    def ratio(self) -> float:
        return self.predicted / statistics.median(self.measured)

    @property
    def over_one(self) -> float:
        """The measured time relative to that of one device."""
        return median_ratio(self.measured, self.baseline)

    @property
    def ratio_without_drift(self) -> float:
        """The predicted time relative to one device, over the measured one: the machine's speed cancels out."""
        return self.predicted / self.predicted_baseline / self.over_one


@dataclass(frozen=True)
class ShapeResult:
    """What one shape adds to the table and the figures."""

    rows: list[Row]
    trials: tuple[Trial, ...]
    gain: float  # of the partition for a large softmax

    def ratios_to_best(self, row: Row) -> list[float]:
        """The times of a layout relative to the fastest, in the rounds of the second measurement."""
        return max(self._ratios(row), key=statistics.median)

    def _ratios(self, row: Row) -> list[list[float]]:
        """The times of a layout relative to each one that was measured again, in the rounds of both."""
        assert row.again is not None, "the choices are always measured again"
        rivals = [other.again for other in self.rows if other.again]
        return [[mine / its for mine, its in zip(row.again, rival, strict=False)] for rival in rivals]

    def over_best_if_equal(self, row: Row, generator: np.random.Generator) -> NDArray[np.float64]:
        """What `over_best` is in each resample of the rounds, if all that are not clearly slower were equally fast."""
        assert row.again is not None, "the choices are always measured again"
        ratios = [np.array(each) for each in self._ratios(row) if median_bounds(each)[1] >= 1]
        equal = [each / np.median(each) for each in ratios]
        medians = np.ones((NUM_RESAMPLES, len(equal)))
        for number, drawn in enumerate(generator.integers(len(row.again), size=(NUM_RESAMPLES, len(row.again)))):
            for index, each in enumerate(equal):
                if (own := drawn[drawn < len(each)]).size:  # one that has left has only the first rounds
                    medians[number, index] = np.median(each[own])
        worst: NDArray[np.float64] = medians.max(axis=1)
        return worst

    def over_best(self, row: Row) -> float:
        """The time of a layout relative to the fastest, in the second measurement."""
        return statistics.median(self.ratios_to_best(row))

    def describe(self, row: Row) -> str:
        """Say whether a layout was chosen, and how it compares with the fastest, with bounds of that figure."""
        names = ["predicted"] * row.is_predicted + ["chosen"] * row.is_chosen
        if not names:
            return ""
        low, high = median_bounds(self.ratios_to_best(row))
        return f"{' '.join(names)}: {self.over_best(row):.2f} ({low:.2f} to {high:.2f})"

    @property
    def chosen(self) -> Row:
        return next(row for row in self.rows if row.is_chosen)

    @property
    def by_prediction(self) -> Row:
        return next(row for row in self.rows if row.is_predicted)

    @property
    def first_best(self) -> Row:
        """The fastest layout of the first measurement."""
        return min(self.rows, key=lambda row: row.over_one)

    @property
    def rank_correlation(self) -> float:
        """That of predicted and measured times of the shape's layouts."""
        return rank_correlation([row.predicted for row in self.rows], [row.over_one for row in self.rows])


def run_shape(shape: Shape, corpus: Path, num_tried: int, *, is_quick: bool) -> ShapeResult:
    """Predict, try and measure the layouts of one shape."""
    console, started = Console(stderr=True), time.perf_counter()
    console.print(f"{shape.name}: measuring the profile")
    trial_ranks, pools = RankPool(4), PausedPools()
    profile = trial_ranks.run(measure, corpus, shape, seconds=600)[0]
    console.print(f"{shape.name}: measured the profile after {time.perf_counter() - started:.0f} s")
    workload = shape.workload(corpus)
    cluster = Cluster(4)
    predicted_plan = find_plan(profile, workload, cluster)
    plan = try_plan(predicted_plan, trial_ranks, corpus, shape, num_tried)
    trial_ranks.close()
    by_prediction, chosen = predicted_plan.chosen.layout, plan.chosen.layout
    trials = {trial.layout: trial for trial in plan.trials}
    layouts = list(dict.fromkeys([*layouts_of(shape, profile, workload), by_prediction, *trials]))
    costs = CostModel(profile)
    predicted = [predict(costs, workload, layout, cluster).seconds for layout in layouts]
    steps = max(1, round(0.4 / max(predicted)))
    rounds = min(FIRST_ROUNDS, max(QUICK_ROUNDS, int(FIRST_SECONDS / (steps * sum(predicted)))))
    rounds = QUICK_ROUNDS if is_quick else rounds
    measured = take_turns(pools, corpus, shape, layouts, rounds, steps)
    fastest = min(measured, key=lambda seconds: median_ratio(seconds, measured[0]))
    rivals = [
        layout
        for layout, seconds in zip(layouts, measured, strict=True)
        if median_ratio(seconds, fastest) <= RIVAL_FACTOR or layout in (by_prediction, *trials)
    ]
    kept = [chosen, by_prediction, layouts[measured.index(fastest)]]
    again = measure_again(pools, corpus, shape, rivals, kept, steps, 0.0 if is_quick else SECOND_SECONDS)
    gain = partition_gain(pools, corpus, profile) if shape.name == "words" else 0.0
    pools.close()
    console.print(f"{shape.name}: done after {time.perf_counter() - started:.0f} s")
    # The first layout is one device.
    rows = [
        Row(shape.name, layout, predicted_seconds, seconds, measured[0], predicted[0], layout == chosen,
            layout == by_prediction, trials.get(layout), again.get(layout))
        for layout, predicted_seconds, seconds in zip(layouts, predicted, measured, strict=True)
    ]  # fmt: skip
    return ShapeResult(rows, plan.trials, gain)


def try_plan(plan: Plan, pool: RankPool, corpus: Path, shape: Shape, num_tried: int) -> Plan:
    """The plan after its finalists were tried; all layouts run on the four ranks, or on the first of them."""
    finalists = find_finalists(plan, num_tried)
    if not finalists:
        return plan
    return choose_by_trials(plan, pool.run(try_finalists, corpus, shape, finalists, seconds=600)[0])


def take_turns(
    pools: PausedPools, corpus: Path, shape: Shape, layouts: list[Layout], rounds: int, steps: int
) -> list[list[float]]:
    """Run the layouts in turns and return the seconds of each in every round."""
    turns: list[list[float]] = [[] for _ in layouts]
    console = Console(stderr=True)
    for index in track(range(rounds), f"{shape.name}: taking turns", console=console, transient=True):
        order = range(len(layouts)) if index % 2 else reversed(range(len(layouts)))
        for number in order:
            layout = layouts[number]
            times = pools.run((shape, layout), layout.num_ranks, take_turn, corpus, shape, layout, steps, seconds=120)
            turns[number].append(max(times))
    return turns


def measure_again(
    pools: PausedPools,
    corpus: Path,
    shape: Shape,
    rivals: list[Layout],
    kept: list[Layout],
    steps: int,
    seconds: float,
) -> dict[Layout, list[float]]:
    """Run layouts in turns for some seconds and return the seconds of each.

    Those leave that the first of `kept` is as fast as. The others of `kept` stay as long as some other layout does.
    """
    remaining, times = rivals, {layout: list[float]() for layout in rivals}
    started = time.perf_counter()
    while True:
        turns = take_turns(pools, corpus, shape, remaining, DROP_ROUNDS, steps)
        for layout, layout_turns in zip(remaining, turns, strict=True):
            times[layout] += layout_turns
        open_rivals = [layout for layout in remaining if not is_close(times[kept[0]], times[layout])]
        if not open_rivals or time.perf_counter() - started >= seconds:
            return times
        remaining = [layout for layout in remaining if layout in kept or layout in open_rivals]


def is_close(seconds: list[float], others: list[float]) -> bool:
    """Return whether a layout takes at most CLOSE times as long as another, by the upper bound of the median."""
    return median_bounds([own / its for own, its in zip(seconds, others, strict=True)])[1] <= CLOSE


def partition_gain(pools: PausedPools, corpus: Path, profile: Profile) -> float:
    """The speed of the planner's partition relative to equal numbers of blocks: two stages, long windows."""
    cut = Layout(stages=2, chunks=8)
    ours = balance(profile, LONG.workload(corpus), Cluster(2), cut)
    equal = cut.model_copy(update={"blocks": (3, 3)})
    turns = take_turns(pools, corpus, LONG, [ours, equal], 4, steps=1)
    seconds = [
        f"blocks {layout.blocks} {statistics.median(times):.2f} s"
        for layout, times in zip([ours, equal], turns, strict=True)
    ]
    print(f"{LONG.name}: {', '.join(seconds)}")
    return median_ratio(turns[1], turns[0])


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Return Spearman's rank correlation."""
    places = [[sorted(values).index(value) for value in values] for values in (first, second)]
    return statistics.correlation(*places)


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted against measured step times.")
    parser.add_argument("--quick", action="store_true", help="two shapes, fewer rounds")
    parser.add_argument("--shape", help="only this shape")
    parser.add_argument("--try", dest="num_tried", type=int, default=5, help="how many layouts are tried (default: 5)")
    options = parser.parse_args()
    shapes, started = [shape for shape in SHAPES if options.shape in (None, shape.name)], time.perf_counter()
    if options.quick and not options.shape:
        shapes = [shapes[0], shapes[-1]]
    results: list[ShapeResult] = []
    with tempfile.TemporaryDirectory() as folder:
        prepare_text([WIKITEXT / "valid.txt"], Path(folder) / "bytes")
        for shape in shapes:
            results.append(run_shape(shape, Path(folder) / "bytes", options.num_tried, is_quick=options.quick))
    report(results, (time.perf_counter() - started) / 60)


def report(results: list[ShapeResult], minutes: float) -> None:
    """Print the table and the figures."""
    rows = [row for result in results for row in result.rows]
    trials = [trial for result in results for trial in result.trials]
    generator = np.random.default_rng(1)
    if_equal = np.max([result.over_best_if_equal(result.chosen, generator) for result in results], axis=0)
    # One device is the baseline.
    several = [row for row in rows if row.layout.num_ranks > 1]
    tiny = [row for row in rows if row.shape == "tiny"]
    show(
        "predicted against measured, one thread per rank",
        COLUMNS,
        [
            [
                row.shape,
                row.layout.name,
                "|".join(map(str, row.layout.blocks)),
                f"{row.predicted * 1e3:.1f}",
                f"{statistics.median(row.measured) * 1e3:.1f}",
                f"{row.ratio:.2f}",
                f"{row.ratio_without_drift:.2f}" if row.layout.num_ranks > 1 else "",
                "" if row.trial is None or row.trial.measured is None else f"{row.trial.measured * 1e3:.1f}",
                "" if row.trial is None else str(row.trial.steps),
                "" if row.again is None else f"{statistics.median(row.again) * 1e3:.1f}",
                result.describe(row),
            ]
            for result in results
            for row in result.rows
        ],
        {
            "layouts": len(several),
            "within_15_percent": sum(abs(row.ratio_without_drift - 1) <= 0.15 for row in several),
            "within_15_percent_with_drift": sum(abs(row.ratio - 1) <= 0.15 for row in rows),
            # Of the worst shape: that of all layouts would be high only because shapes differ in size.
            "rank_correlation": min(result.rank_correlation for result in results),
            "chosen_over_best": max(result.over_best(result.chosen) for result in results),
            "chosen_over_best_if_equal": statistics.median(if_equal),
            "chosen_over_best_if_equal_at_most": float(np.quantile(if_equal, 0.95)),
            "predicted_over_best": max(result.over_best(result.by_prediction) for result in results),
            "measured_over_best": max(result.over_best(result.first_best) for result in results),
            "layouts_tried": len(trials),
            "trial_steps": sum(trial.steps for trial in trials),
            "trial_seconds": sum(trial.seconds for trial in trials),
            "partition_gain": max(result.gain for result in results),
            # For the tiny model the planner chooses one device, and one device is fastest.
            "one_device_wins": float(
                bool(tiny)
                and all(row.is_chosen == (row.layout.num_ranks == 1) for row in tiny)
                and min(tiny, key=lambda row: row.over_one).layout.num_ranks == 1
            ),
            "minutes": minutes,
        },
    )


if __name__ == "__main__":
    main()
