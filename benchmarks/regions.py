"""Regions compared with DistributedDataParallel, the old engine and one device, on two gloo ranks, one thread each.

    python benchmarks/regions.py [--quick] [--part speed|few|auto|host]

speed  4 LSTM layers of 512: a region and the old engine's stages, each with its best number of chunks, and DDP
few    the same layers with two rows on two ranks, and with one row: what a region gains where DDP has little to divide
auto   layout="auto" after it has chosen, beside DDP and every fixed layout, in models where each of them may win
host   the host's own time of a call with tiny tensors, beside nn.LSTM in as many chunks; `wall`: waiting included

All contenders run alternately on the same two ranks. A step is as slow as its slowest rank. Ratios are medians over the
rounds; `auto` is compared by the ratios within each round, and `_low` and `_high` are their 95 % interval.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence

import stretto
from paused_pools import PausedPools
from stretto import World, make_engine, parallelize
from stretto.data import Window
from stretto.nn import LSTM, Linear, LossSum, Stack, initialize
from stretto.parallel import Layout, layouts
from stretto.parallel.guard import Call
from timing import show

Step = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """A model and its rows over both ranks."""

    name: str
    rows: int
    window: int
    hidden: int = 512
    layers: int = 4
    vocabulary: int = 0
    bidirectional: bool = False
    shortest: int = 0  # packed rows, of so many steps at least


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.hidden * (2 if shape.bidirectional else 1)
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden) if shape.vocabulary else nn.Identity()
        self.lstm = nn.LSTM(shape.hidden, shape.hidden, shape.layers, bidirectional=shape.bidirectional)
        self.head = nn.Linear(width, shape.vocabulary or shape.hidden)

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        x = self.embedding(x)
        if lengths is None:
            output: Tensor = self.head(self.lstm(x)[0])
        else:
            output = self.head(self.lstm(pack_padded_sequence(x, lengths, enforce_sorted=False))[0].data)
        return output


def plain_step(shape: Shape, share: slice, wrap: Callable[[nn.Module], nn.Module]) -> Step:
    """Return a training step of torch's own loop on some of the rows."""
    torch.manual_seed(0)
    model = wrap(Model(shape))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(1)
    if shape.vocabulary:
        x = torch.randint(shape.vocabulary, (shape.window, shape.rows), generator=generator)[:, share]
    else:
        x = torch.randn(shape.window, shape.rows, shape.hidden, generator=generator)[:, share].contiguous()
    lengths = None
    if shape.shortest:
        lengths = torch.randint(shape.shortest, shape.window + 1, (shape.rows,), generator=generator)[share]

    def step() -> None:
        optimizer.zero_grad()
        output = model(x, lengths)
        if shape.vocabulary:
            loss = nn.functional.cross_entropy(output.flatten(0, 1), x.flatten())
        else:
            loss = output.square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def engine_step(shape: Shape, world: World, chunks: int) -> Step:
    """Return a step of the old engine with two stages, without its optimizer (which `plain_step` has)."""
    stack = Stack(
        [*(LSTM(shape.hidden, shape.hidden) for _ in range(shape.layers)), Linear(shape.hidden, shape.hidden)]
    )

    def loss(y: Tensor, targets: Tensor) -> LossSum:
        return LossSum(y.square().sum(), torch.tensor(y.numel()))

    engine = make_engine(initialize(stack, seed=1), loss, stretto.Layout(stages=2, chunks=chunks), world)
    optimizer = torch.optim.SGD(engine.stack.parameters(), 1e-3)
    x = torch.randn(shape.window, shape.rows, shape.hidden, generator=torch.Generator().manual_seed(1))
    lengths, fresh = torch.full((shape.rows,), shape.window), torch.ones(shape.rows, dtype=torch.bool)
    window = Window(shape.window, torch.arange(shape.rows), lengths, fresh, x, x)

    def step() -> None:
        optimizer.zero_grad()
        engine.step(window, None, 0)
        optimizer.step()

    return step


def run_on_two(
    pools: PausedPools, shape: Shape, fixed: dict[str, Layout], names: list[str], rounds: int
) -> dict[str, list[float]]:
    """Run the contenders on two ranks; return the seconds of each, as its slowest rank needs, round by round."""
    by_rank = pools.run(shape.name, 2, measure, shape, fixed, names, rounds, seconds=3600)
    pools.start(shape.name, 2).close()
    return {name: [max(each) for each in zip(*(found[name] for found in by_rank), strict=True)] for name in by_rank[0]}


def measure(
    world: World, shape: Shape, fixed: dict[str, Layout], names: list[str], rounds: int
) -> dict[str, list[float]]:
    """Run the contenders alternately on this rank; return the seconds of each, round by round."""
    torch.set_flush_denormal(True)
    if shape.rows < world.size:  # one row: rank 1 has none
        own = slice(0, shape.rows) if world.is_rank_zero else slice(shape.rows, shape.rows)
    else:
        own = slice(shape.rows * world.rank // world.size, shape.rows * (world.rank + 1) // world.size)
    steps: dict[str, Step] = {}
    if "one" in names and world.is_rank_zero:
        steps["one"] = plain_step(shape, slice(0, shape.rows), lambda model: model)
    elif "one" in names:
        steps["one"] = lambda: None
    steps["ddp"] = plain_step(shape, own, _ddp)
    for name, layout in fixed.items():
        steps[name] = plain_step(shape, own, partial(_shared, layout))
        if "engine" in names:
            steps[f"engine {layout.chunks}"] = engine_step(shape, world, layout.chunks)
    if "auto" in names:
        chosen: list[nn.Module] = []
        steps["auto"] = plain_step(shape, own, lambda model: _ddp(_keep(chosen, parallelize(model))))
        while not _is_settled(chosen[0], steps["auto"]):
            steps["auto"]()
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    shuffled = random.Random(0)
    for _ in range(rounds):
        for name in shuffled.sample([*steps], len(steps)):
            dist.barrier()
            started = time.perf_counter()
            steps[name]()
            dist.barrier()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def _shared(layout: Layout, model: nn.Module) -> nn.Module:
    return _ddp(parallelize(model, layout))


def _ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def _keep(models: list[nn.Module], model: nn.Module) -> nn.Module:
    models.append(model)
    return model


def _is_settled(model: nn.Module, step: Step) -> bool:
    """Take a few steps, and say whether all that can be chosen has been; short steps go on until nothing is asked."""
    started = time.perf_counter()
    for _ in range(10):
        step()
    is_settled = all(layouts(model).values())
    if is_settled and time.perf_counter() - started < 5:
        for _ in range(60):
            step()
    return is_settled


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Return the median of ratios and its 95 % interval, by resampling."""
    generator = random.Random(0)
    medians = sorted(median(generator.choices(ratios, k=len(ratios))) for _ in range(2000))
    return median(ratios), medians[50], medians[1949]


def host_time(world: World, rounds: int) -> dict[str, tuple[float, float]]:
    """Return the microseconds of a call, forward and backward, with tiny tensors: the host's own, and on the clock."""
    chunks, layers = 8, 4
    times: dict[str, list[tuple[float, float]]] = {"region": [], "chunks": [], "guard": []}
    plain = nn.LSTM(4, 4, layers // 2)
    shared = parallelize(nn.LSTM(4, 4, layers), Layout(2, chunks))
    x, whole = torch.randn(16, 1, 4), torch.randn(16, 2, 4)

    def in_chunks() -> None:
        state, outputs = None, []
        for chunk in whole.chunk(chunks):
            output, state = plain(chunk, state)
            outputs.append(output)
        torch.cat(outputs).sum().backward()  # type: ignore[no-untyped-call]

    def region() -> None:
        shared(x)[0].sum().backward()

    region()
    group = shared.__dict__["_stretto_region"]._group
    sides: dict[str, Step] = {
        "region": region, "chunks": in_chunks, "guard": lambda: group.guard.compare(Call(0, 0, False, 0, 0)),
    }  # fmt: skip
    for _ in range(rounds):
        for name, side in sides.items():
            dist.barrier()
            started, started_thread = time.perf_counter(), time.thread_time()
            side()
            times[name].append((1e6 * (time.thread_time() - started_thread), 1e6 * (time.perf_counter() - started)))
    return {name: (median(own for own, _ in each), median(wall for _, wall in each)) for name, each in times.items()}


SPEED = [Shape("32x256", 32, 256), Shape("8x512", 8, 512)]
FEW = [Shape("2x512", 2, 512), Shape("1x512", 1, 512)]
AUTO = [
    Shape("H64", 32, 128, hidden=64),
    Shape("one_layer", 16, 128, layers=1),
    Shape("bidirectional", 16, 128, hidden=256, bidirectional=True),
    Shape("T20", 32, 20),
    Shape("vocabulary", 8, 64, hidden=256, vocabulary=33_000),
    Shape("packed", 16, 200, hidden=256, shortest=20),
    *FEW,
    *SPEED[::-1],
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Regions compared with DDP, the old engine and one device.")
    parser.add_argument("--quick", action="store_true", help="end within two minutes, with coarser figures")
    parser.add_argument("--part", choices=["speed", "few", "auto", "host"], help="only this")
    options = parser.parse_args()
    parts = [options.part] if options.part else ["speed", "few", "auto", "host"]
    pools, rows, figures = PausedPools(), [], {}

    def run(shape: Shape, chunks: list[int], names: list[str], rounds: int) -> dict[str, list[float]]:
        return run_on_two(pools, shape, {f"region {count}": Layout(2, count) for count in chunks}, names, rounds)

    for shape in SPEED if "speed" in parts else []:
        chunks, rounds = ([8], 2) if options.quick else ([6, 8, 12], 9)
        seconds = run(shape, chunks, ["one", "engine"], rounds)
        middle = {name: median(each) for name, each in seconds.items()}
        region, engine = (
            min(value for name, value in middle.items() if name.startswith(kind)) for kind in ("region", "engine")
        )
        figures[f"region_over_engine_{shape.name}"] = engine / region
        figures[f"region_over_ddp_{shape.name}"] = middle["ddp"] / region
        rows += _rows(shape, middle, middle["one"])
    if "speed" in parts:
        figures["region_over_engine_worst"] = min(figures[f"region_over_engine_{shape.name}"] for shape in SPEED)
    for shape in FEW if "few" in parts else []:
        chunks, rounds = ([8], 3) if options.quick else ([4, 8, 16, 32], 9)
        middle = {name: median(each) for name, each in run(shape, chunks, ["one"], rounds).items()}
        region = min(value for name, value in middle.items() if name.startswith("region"))
        figures[f"region_over_ddp_{shape.name}"] = middle["ddp"] / region
        rows += _rows(shape, middle, middle["one"])
    for shape in (AUTO[:1] if options.quick else AUTO) if "auto" in parts else []:
        chunks = (
            []
            if shape.bidirectional or shape.layers == 1
            else [count for count in (4, 8, 16) if 2 * count <= shape.window]
        )
        seconds = run(shape, chunks, ["auto"], 9 if options.quick else 15)
        middle = {name: median(each) for name, each in seconds.items()}
        fastest = min((name for name in middle if name != "auto"), key=middle.__getitem__)
        ratio, low, high = interval([best / auto for best, auto in zip(seconds[fastest], seconds["auto"], strict=True)])
        figures |= {
            f"auto_over_best_{shape.name}": ratio,
            f"auto_{shape.name}_low": low,
            f"auto_{shape.name}_high": high,
        }
        print(f"{shape.name}: auto is {ratio:.3f} of {fastest} ({low:.3f} to {high:.3f})", file=sys.stderr, flush=True)
        rows += _rows(shape, middle, middle["ddp"])
    if "auto" in parts:
        figures["auto_over_best_worst"] = min(
            value for name, value in figures.items() if name.startswith("auto_over_best")
        )
        figures["auto_high_worst"] = min(value for name, value in figures.items() if name.endswith("_high"))
    if "host" in parts:
        times = pools.run("host", 2, host_time, 100 if options.quick else 500)[0]
        for name, key in (
            ("region", "host_us_per_call"),
            ("chunks", "host_us_of_chunks"),
            ("guard", "host_us_of_guard"),
        ):
            figures |= {key: times[name][0], key.replace("host", "wall"): times[name][1]}
    pools.close()
    columns = ["model", "contender", "seconds per step", "over one device, or DDP"]
    show("4 LSTM layers on two gloo ranks, fp32", columns, rows, figures)


def _rows(shape: Shape, middle: dict[str, float], base: float) -> list[list[str]]:
    return [[shape.name, name, f"{value:.4f}", f"{base / value:.2f}"] for name, value in middle.items()]


if __name__ == "__main__":
    main()
