"""How much faster steps are because ranks on the CPU keep the memory that they free, and how much memory that costs.

    python benchmarks/freed_memory.py [--quick]

For each model and layout, two worlds take turns: one keeps freed memory, as `make_engine` sets it up; in the other,
glibc's malloc is as it is by default. Each pair runs three times in new processes, because blocks of memory are
elsewhere in each process.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from resource import RUSAGE_SELF, getrusage

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track

from paused_pools import PausedPools
from stretto import Layout, World, make_engine
from stretto.data import Window
from stretto.measure.timing import median_ratio
from stretto.mesh.device import peak_memory
from stretto.nn import LSTM, BidirectionalLSTM, Block, SquaredError, Stack
from timing import malloc_by_default, parse_quick, show

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
    Shape("narrow", 8, 128, 32, 128),
    Shape("wide", 2, 1024, 16, 32),
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
    peak_megabytes: float  # of the process, until the end of the step


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
    seconds = time.perf_counter() - started
    return Turn(seconds, getrusage(RUSAGE_SELF).ru_minflt - faults, peak_memory(world.device) / 1e6)


def measure(shape: Shape, layout: Layout, rounds: int) -> list[list[Turn]]:
    """Return the turns of the world that keeps memory, and of the other; each that of the slowest rank."""
    pools = PausedPools()
    turns: list[list[Turn]] = [[], []]
    pools.start("kept", layout.num_ranks)
    with malloc_by_default():
        pools.start("default", layout.num_ranks)
    for index in range(rounds):
        for side in (0, 1) if index % 2 else (1, 0):
            ranks = pools.run(("kept", "default")[side], layout.num_ranks, take_turn, shape, layout)
            turns[side].append(max(ranks, key=lambda turn: turn.seconds))
    pools.close()
    return turns


def main() -> None:
    is_quick = parse_quick("How much faster steps are because ranks on the CPU keep the memory that they free.")
    shapes, repeats, rounds = (SHAPES[:1], 1, 4) if is_quick else (SHAPES, 3, 12)
    rows: list[list[str]] = []
    figures: dict[str, float] = {}
    pairs = [(shape, layout) for shape in shapes for layout in LAYOUTS]
    for shape, layout in track(pairs, "taking turns", console=Console(stderr=True), transient=True):
        repeated = [measure(shape, layout, rounds) for _ in range(repeats)]
        sides = [[turn for turns in repeated for turn in turns[side]] for side in (0, 1)]
        seconds = [[turn.seconds for turn in turns] for turns in sides]
        faults = [statistics.median(turn.page_faults for turn in turns) for turns in sides]
        peaks = [max(turn.peak_megabytes for turn in turns) for turns in sides]
        share = median_ratio(seconds[0], seconds[1])
        name = f"{shape.name}_{layout.num_ranks}"
        figures |= {f"{name}_time": share, f"{name}_memory": peaks[0] / peaks[1]}
        rows.append(
            [shape.name, layout.name, *(f"{statistics.median(values) * 1e3:.0f}" for values in seconds),
             f"{share:.2f}", *(f"{count:,.0f}" for count in faults), *(f"{peak:,.0f}" for peak in peaks)]
        )  # fmt: skip
    show(
        "Freed memory, kept or as by default, one thread per rank; page faults and memory of the slowest rank",
        ["model", "layout", "kept ms", "default ms", "ratio", "kept faults", "default faults", "kept MB", "default MB"],
        rows,
        figures,
    )


if __name__ == "__main__":
    main()
