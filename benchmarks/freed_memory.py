"""What it gains that ranks on the CPU keep the memory that their steps free.

    python benchmarks/freed_memory.py [--quick]

For each model and layout, two worlds take turns: one keeps freed memory, as `make_engine` sets it up; in the other,
glibc's malloc is as it is by default. Each pair runs three times in new processes, since where memory lies differs.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track

from stretto import Layout, World, make_engine
from stretto.data import Window
from stretto.measure.timing import median_ratio
from stretto.nn import LSTM, BidirectionalLSTM, Block, SquaredError, Stack
from timing import parse_quick, show

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.rank_pool import RankPool

# If it is set, stretto leaves malloc as it is. glibc has read it already when the process started.
SETTING = "GLIBC_TUNABLES"
LAYOUTS = Layout(), Layout(replicas=2)


@dataclass(frozen=True)
class Shape:
    """The model and batch to train."""

    name: str
    layers: int
    hidden: int
    rows: int
    window: int
    is_bidirectional: bool = False

    def model(self) -> Stack:
        blocks: list[Block] = [LSTM(self.hidden, self.hidden) for _ in range(self.layers)]
        if self.is_bidirectional:
            blocks = [BidirectionalLSTM(self.hidden * (2 if layer else 1), self.hidden) for layer in range(self.layers)]
        return Stack(blocks)

    def batch(self) -> Window:
        x = torch.randn(self.window, self.rows, self.hidden)
        targets = torch.zeros(self.window, self.rows, self.hidden * (2 if self.is_bidirectional else 1))
        lengths, fresh = torch.full((self.rows,), self.window), torch.ones(self.rows, dtype=torch.bool)
        return Window(self.window, torch.arange(self.rows), lengths, fresh, x, targets)


SHAPES = [
    Shape("narrow and deep", 8, 128, 32, 128),
    Shape("wide and shallow", 2, 1024, 16, 32),
    Shape("bidirectional", 3, 192, 4, 192, is_bidirectional=True),
]
Step = Callable[[], object]
# Each rank keeps its engine between turns.
_STEPS: list[Step] = []


@dataclass(frozen=True)
class Turn:
    """One step of one rank."""

    seconds: float
    page_faults: int


def take_turn(world: World, shape: Shape, layout: Layout) -> Turn:
    """Take a step; build the engine and take three steps before the first one."""
    if not _STEPS:
        engine = make_engine(shape.model(), SquaredError(), layout, world, seed=1)
        rows = slice(shape.rows * world.rank // world.size, shape.rows * (world.rank + 1) // world.size)
        window = shape.batch()[rows]
        _STEPS.append(lambda: engine.step(window, None, 0))
        for _ in range(3):
            _STEPS[0]()
    if world.size > 1:
        dist.barrier()
    started, faults = time.perf_counter(), getrusage(RUSAGE_SELF).ru_minflt
    _STEPS[0]()
    return Turn(time.perf_counter() - started, getrusage(RUSAGE_SELF).ru_minflt - faults)


def start(layout: Layout, *, keeps_memory: bool) -> RankPool:
    """Start the ranks of a world."""
    os.environ.pop(SETTING, None)
    if not keeps_memory:
        os.environ[SETTING] = "glibc.malloc.check=0"  # the default
    return RankPool(layout.num_ranks)


def measure(shape: Shape, layout: Layout, rounds: int) -> list[list[Turn]]:
    """Return the turns of the world that keeps memory, and of the other; each the one of the slowest rank."""
    pools = [start(layout, keeps_memory=keeps_memory) for keeps_memory in (True, False)]
    turns: list[list[Turn]] = [[], []]
    for index in range(rounds):
        for side in (0, 1) if index % 2 else (1, 0):
            ranks = pools[side].run(take_turn, shape, layout)
            pools[side].pause()
            turns[side].append(max(ranks, key=lambda turn: turn.seconds))
    for pool in pools:
        pool.close()
    return turns


def main() -> None:
    is_quick = parse_quick("What it gains that ranks on the CPU keep the memory that their steps free.")
    shapes, repeats, rounds = (SHAPES[:1], 1, 4) if is_quick else (SHAPES, 3, 12)
    rows, shares = [], {}
    pairs = [(shape, layout) for shape in shapes for layout in LAYOUTS]
    for shape, layout in track(pairs, "taking turns", console=Console(stderr=True), transient=True):
        repeated = [measure(shape, layout, rounds) for _ in range(repeats)]
        kept, default = ([turn for turns in repeated for turn in turns[side]] for side in (0, 1))
        seconds = [[turn.seconds for turn in turns] for turns in (kept, default)]
        faults = [statistics.median(turn.page_faults for turn in turns) for turns in (kept, default)]
        share = median_ratio(seconds[0], seconds[1])
        shares[f"{shape.name}, {layout.name}"] = share
        rows.append(
            [shape.name, layout.name, *(f"{statistics.median(values) * 1e3:.0f}" for values in seconds),
             *(f"{count:,.0f}" for count in faults), f"{share:.2f}"]
        )  # fmt: skip
    show(
        "Freed memory, kept or returned, one thread per rank",
        ["model", "layout", "kept: ms", "default: ms", "kept: page faults", "default: page faults", "ratio of times"],
        rows,
        shares,
    )


if __name__ == "__main__":
    main()
