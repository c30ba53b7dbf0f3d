"""Two spans of a bidirectional stack compared with one device and with data parallel, on gloo.

    python benchmarks/spans.py [--quick]

All contenders run in turns: while one runs, the ranks of the others are paused. One thread per rank; "torch, 2 threads"
is one process with torch's own modules. For comparison, B-Par (IPDPS 2022), which runs the cells of bidirectional RNNs
as tasks on the cores of one CPU, reports up to 9.16 times the speed of PyTorch, and 2.34 times that of TF-Keras.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paused_pools import PausedPools
from stretto import Layout, World, make_engine
from stretto.data import Window
from stretto.nn import BidirectionalLSTM, LossSum, Stack, initialize
from stretto.plan.actions import Action
from stretto.plan.draw import draw_text
from stretto.plan.simulator import simulate
from stretto.plan.span_schedule import SpanGrid, SweepShape, span_schedules
from stretto.plan.timeline import TimedAction, Timeline
from stretto.testing import LocalEngine
from timing import parse_quick, ping, show

LAYERS, HIDDEN = 4, 512


@dataclass(frozen=True)
class Shape:
    """The batch to train on."""

    rows: int
    window: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.window}"


@dataclass(frozen=True)
class Turn:
    """One step of one rank: its wall time, and the time of each action."""

    seconds: float
    timed_actions: tuple[TimedAction, ...] = ()


Step = Callable[[], Any]
# Each rank keeps its steps between turns: built once, run often.
_STEPS: dict[tuple[str, Shape], Step] = {}


def model() -> Stack:
    blocks = [BidirectionalLSTM(2 * HIDDEN if layer else HIDDEN, HIDDEN) for layer in range(LAYERS)]
    return initialize(Stack(blocks), seed=1)


def batch(shape: Shape) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape.window, shape.rows, HIDDEN, generator=generator)
    return x, torch.randn(shape.window, shape.rows, 2 * HIDDEN, generator=generator)


def window(shape: Shape) -> Window:
    lengths, fresh = torch.full((shape.rows,), shape.window), torch.ones(shape.rows, dtype=torch.bool)
    return Window(shape.window, torch.arange(shape.rows), lengths, fresh, *batch(shape))


def plain_loss(y: Tensor, targets: Tensor) -> LossSum:
    """The same loss for every contender, since engines are compared."""
    return LossSum((y - targets).square().sum(), torch.tensor(y.numel()))


def local_step(world: World, shape: Shape) -> Step:
    engine, whole = LocalEngine(model(), plain_loss), window(shape)
    return lambda: engine.step(whole, None, 0)


def span_step(world: World, shape: Shape) -> Step:
    engine, whole = make_engine(model(), plain_loss, Layout(spans=2), world), window(shape)

    def step() -> list[TimedAction]:
        engine.recorder.start()
        engine.step(whole, None, 0)
        return engine.recorder.stop()

    return step


class TorchStack(nn.Module):
    """The same network, of torch's own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(block.cell for block in model() if isinstance(block, BidirectionalLSTM))

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.cells:
            x, _ = cell(x)
        return x


def torch_step(world: World, shape: Shape) -> Step:
    """Torch's own modules; on two ranks with DistributedDataParallel, on one with two threads."""
    network: nn.Module = TorchStack()
    if world.size > 1:
        network = DistributedDataParallel(network)
    rows = slice(shape.rows * world.rank // world.size, shape.rows * (world.rank + 1) // world.size)
    x, targets = (tensor[:, rows].contiguous() for tensor in batch(shape))

    def step() -> None:
        torch.set_num_threads(2 if world.size == 1 else 1)
        network.zero_grad()
        (network(x) - targets).square().sum().backward()
        torch.set_num_threads(1)

    return step


CONTENDERS: dict[str, tuple[int, Callable[[World, Shape], Step]]] = {
    "one device": (1, local_step),
    "torch, 2 threads": (1, torch_step),
    "DDP by hand": (2, torch_step),
    "2 spans": (2, span_step),
}


def take_turn(world: World, name: str, shape: Shape) -> Turn:
    if (name, shape) not in _STEPS:
        _STEPS[name, shape] = CONTENDERS[name][1](world, shape)
        _STEPS[name, shape]()
    if world.size > 1:
        dist.barrier()
    started = time.perf_counter()
    timed_actions = _STEPS[name, shape]()
    if world.size > 1:
        dist.barrier()
    seconds = time.perf_counter() - started
    return Turn(seconds, tuple(timed_actions) if isinstance(timed_actions, list) else ())


Turns = dict[str, list[list[Turn]]]


def measure(shape: Shape, pools: PausedPools, rounds: int) -> Turns:
    """Run the contenders in turns; return, for each, its turns on every rank."""
    turns: Turns = {name: [] for name in CONTENDERS}
    for index in track(range(rounds), f"{shape}", console=Console(stderr=True), transient=True):
        for name in CONTENDERS if index % 2 else reversed(CONTENDERS):
            size, _ = CONTENDERS[name]
            turns[name].append(pools.run(name, size, take_turn, name, shape))
    return turns


def best_seconds(turns: list[list[Turn]]) -> float:
    """Return the seconds of the fastest turn, each as slow as its slowest rank."""
    return min(max(rank.seconds for rank in turn) for turn in turns)


def ratio(turns: Turns, name: str) -> float:
    """Return how many times as fast two spans are: the median over the rounds."""
    pairs = zip(turns[name], turns["2 spans"], strict=True)
    return statistics.median(
        max(rank.seconds for rank in other) / max(rank.seconds for rank in spans) for other, spans in pairs
    )


def simulated(turns: list[list[Turn]], link: float) -> tuple[Timeline, float]:
    """Simulate two spans with measured actions; return the timeline, and the median of simulated / measured."""
    sweeps = tuple(SweepShape(layer, is_reverse) for layer in range(LAYERS) for is_reverse in (False, True))
    grid = SpanGrid(sweeps, 2, (2,))
    ratios = []
    for turn in turns:
        costs = {(timed.stage, timed.action): timed.stop - timed.start for rank in turn for timed in rank.timed_actions}

        def cost(span: int, action: Action, costs: dict[tuple[int, Action], float] = costs) -> float:
            return costs[span, action]

        timeline = simulate(span_schedules(grid), cost, lambda span, action: link, neighbors=grid)
        ratios.append(timeline.seconds / max(rank.seconds for rank in turn))
    return timeline, statistics.median(ratios)


def main() -> None:
    is_quick = parse_quick("Two spans of a bidirectional stack compared with one device and data parallel.")
    wide, long = (Shape(32, 64), Shape(2, 256)) if is_quick else (Shape(32, 256), Shape(2, 512))
    shapes = [wide, *([] if is_quick else [Shape(8, 512)]), long]
    pools = PausedPools()
    turns = {shape: measure(shape, pools, 2 if is_quick else 5) for shape in shapes}
    link = pools.run("2 spans", 2, ping, 2 * long.rows * HIDDEN)[0]
    pools.close()
    timeline, simulated_over_measured = simulated(turns[long]["2 spans"], link)
    print(draw_text(timeline, row_name="span"))
    rows = []
    for shape in shapes:
        seconds = {name: best_seconds(turns[shape][name]) for name in CONTENDERS}
        for name, value in seconds.items():
            over_one = f"{seconds['one device'] / value:.2f}"
            rows.append([str(shape), name, f"{value:.3f}", over_one, f"{ratio(turns[shape], name):.2f}"])
    show(
        f"{LAYERS} bidirectional LSTM layers, H={HIDDEN}, fp32, gloo",
        ["rows x steps", "contender", "seconds per step", "over one device", "2 spans over it"],
        rows,
        {
            "spans2_over_one": ratio(turns[wide], "one device"),
            "spans2_over_ddp": ratio(turns[long], "DDP by hand"),
            "ddp_over_one": ratio(turns[wide], "one device") / ratio(turns[wide], "DDP by hand"),
            "spans2_over_torch_threads": ratio(turns[long], "torch, 2 threads"),
            "simulated_over_measured": simulated_over_measured,
        },
    )


if __name__ == "__main__":
    main()
