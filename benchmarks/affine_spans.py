"""Spans of a stack of affine blocks compared with one device, in time and in memory, on gloo.

    python benchmarks/affine_spans.py [--quick]

"2 halves, not connected" are two replicas that each have half of the window's time: the same work and the same
all-reduce of the gradients, but no state from one half to the other. What two spans take beyond that is the cost of the
exchange and of the correction. Contenders run in turns: while one runs, the ranks of the others are paused. One thread
per rank. Memory is measured in processes of their own: the peak of two steps beyond what is resident before them, such
as the inputs, which each rank holds whole; a second figure includes them. Both are measured twice: with the memory that
steps free kept in the process, as stretto does on a CPU, and with malloc's defaults, which need less and take longer.
"""

import re
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track

from paused_pools import PausedPools
from stretto import Layout, World, make_engine
from stretto.base.freed_memory import release_freed_memory
from stretto.data import Window
from stretto.measure.timing import median_ratio
from stretto.nn import LossSum, MinGRU, Stack
from timing import malloc_by_default, parse_quick, show

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.rank_pool import RankPool

LONG_WINDOW = 1_000_000


@dataclass(frozen=True)
class Shape:
    """The model and the batch."""

    layers: int
    width: int
    rows: int
    window: int


Step = Callable[[], object]
# Each rank keeps its steps between turns: built once, run often.
_STEPS: dict[str, Step] = {}


def squared_error(y: torch.Tensor, targets: torch.Tensor) -> LossSum:
    return LossSum((y - targets).square().sum(), torch.tensor(y.numel()))


def make_step(world: World, shape: Shape, layout: Layout) -> Step:
    model = Stack([MinGRU(shape.width, shape.width) for _ in range(shape.layers)])
    engine = make_engine(model, squared_error, layout, world, seed=1)
    x = torch.randn(shape.window, shape.rows, shape.width, generator=torch.Generator().manual_seed(1))
    lengths, fresh = torch.full((shape.rows,), shape.window), torch.ones(shape.rows, dtype=torch.bool)
    # The targets are the inputs, so that a window of a million steps is in memory once.
    window = Window(shape.window, torch.arange(shape.rows), lengths, fresh, x, x)
    return lambda: engine.step(window, None, 0)


def contender(name: str, shape: Shape) -> tuple[int, Shape, Layout]:
    """Return the number of ranks, the part of the batch that each has, and the layout."""
    if name == "one device":
        return 1, shape, Layout()
    if name == "2 spans":
        return 2, shape, Layout(spans=2)
    return 2, Shape(shape.layers, shape.width, shape.rows, shape.window // 2), Layout(replicas=2)


CONTENDERS = ("one device", "2 halves, not connected", "2 spans")


def take_turn(world: World, name: str, shape: Shape) -> float:
    """Return the seconds of a step on this rank."""
    if name not in _STEPS:
        _, own_shape, layout = contender(name, shape)
        _STEPS[name] = make_step(world, own_shape, layout)
        _STEPS[name]()
    if world.size > 1:
        dist.barrier()
    started = time.perf_counter()
    _STEPS[name]()
    return time.perf_counter() - started


def measure_times(shape: Shape, rounds: int) -> dict[str, list[float]]:
    """Run the contenders in turns; return, for each, the seconds of the slowest rank in each round."""
    pools = PausedPools()
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for index in track(range(rounds), "time", console=Console(stderr=True), transient=True):
        for name in CONTENDERS if index % 2 else reversed(CONTENDERS):
            seconds[name].append(max(pools.run(name, contender(name, shape)[0], take_turn, name, shape)))
    pools.close()
    return seconds


def resident_megabytes(name: str) -> float:
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) / 1e3


def measure_peak(world: World, shape: Shape, layout: Layout) -> tuple[float, float]:
    """Return the megabytes of two steps at their peak, beyond those before them, and the seconds of the second."""
    step = make_step(world, shape, layout)
    release_freed_memory(world.device)
    before = resident_megabytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    step()
    started = time.perf_counter()
    step()
    return resident_megabytes("VmHWM") - before, time.perf_counter() - started


def measure_memory(shape: Shape, spans: int, *, by_default: bool) -> tuple[float, float]:
    """Return the peak of the largest rank, in megabytes, and the seconds of a step of the slowest."""
    with malloc_by_default() if by_default else nullcontext():
        pool = RankPool(spans)
    ranks: list[tuple[float, float]] = pool.run(measure_peak, shape, Layout(spans=spans), seconds=300)
    pool.close()
    megabytes, seconds = zip(*ranks, strict=True)
    return max(megabytes), max(seconds)


def input_megabytes(shape: Shape) -> float:
    """Return the size of the inputs, which are the targets too, in megabytes."""
    return 4 * shape.window * shape.rows * shape.width / 1e6


def main() -> None:
    is_quick = parse_quick("Spans of a stack of affine blocks compared with one device, in time and in memory.")
    shape = Shape(layers=4, width=256, rows=2, window=2048 if is_quick else 8192)
    long = Shape(layers=2, width=64, rows=1, window=LONG_WINDOW)
    times = measure_times(shape, 4 if is_quick else 9)
    cases = track(list(product((False, True), (1, 4))), "memory", console=Console(stderr=True), transient=True)
    memory = {case: measure_memory(long, case[1], by_default=case[0]) for case in cases}
    inputs = input_megabytes(long)

    def ratio(name: str) -> float:
        return median_ratio(times[name], times["2 spans"])

    rows = [
        [name, f"{shape.rows} x {shape.window}", f"{statistics.median(seconds):.3f}", f"{ratio(name):.2f}", "", ""]
        for name, seconds in times.items()
    ]
    for (by_default, spans), (megabytes, seconds) in memory.items():
        name = ("one device" if spans == 1 else f"{spans} spans") + (", malloc's defaults" if by_default else "")
        sizes = [f"{megabytes:,.0f}", f"{megabytes + inputs:,.0f}"]
        rows.append([name, f"1 x {LONG_WINDOW}", f"{seconds:.3f}", "", *sizes])

    def share(extra: float, *, by_default: bool) -> float:
        return (memory[by_default, 4][0] + extra) / (memory[by_default, 1][0] + extra)

    show(
        f"{shape.layers} MinGRU layers, H={shape.width} (long window: {long.layers}, H={long.width}), fp32, gloo",
        [
            "contender",
            "rows x steps",
            "seconds per step",
            "time relative to 2 spans",
            "peak MB per rank",
            "with inputs",
        ],
        rows,
        {
            "spans2_over_one": ratio("one device"),
            "correction_cost": 1 - ratio("2 halves, not connected"),
            "memory_share": share(0, by_default=False),
            "memory_share_with_inputs": share(inputs, by_default=False),
            "default_malloc_memory_share": share(0, by_default=True),
            "default_malloc_memory_share_with_inputs": share(inputs, by_default=True),
            "default_malloc_time_1": memory[True, 1][1] / memory[False, 1][1],
            "default_malloc_time_4": memory[True, 4][1] / memory[False, 4][1],
        },
    )


if __name__ == "__main__":
    main()
