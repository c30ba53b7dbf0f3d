"""The wavefront compared with one device, torch's pipelining, and hand-written data parallel, on gloo.

    python benchmarks/wavefront.py [--quick] [--svg FILE]

All contenders run in turns: while one runs, the ranks of the others are paused. One thread per rank.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from paused_pools import PausedPools
from stretto import Layout, World, make_engine
from stretto.data import Window
from stretto.engine.pipeline import PipelineEngine
from stretto.nn import LSTM, LossSum, Stack, initialize
from stretto.plan.actions import Action
from stretto.plan.draw import draw_text
from stretto.plan.schedule import stage_schedule
from stretto.plan.simulator import simulate
from stretto.plan.timeline import TimedAction, Timeline
from stretto.report.gantt import bars_from_timeline, gantt, stage_names
from stretto.testing import LocalEngine
from timing import ping, show

MAX_SECONDS = 540  # after which no round begins: a run ends within 12 minutes also on a slow machine
_STARTED = time.monotonic()


@dataclass(frozen=True)
class Shape:
    """The model and batch to train."""

    layers: int = 4
    hidden: int = 512
    rows: int = 32
    window: int = 256


@dataclass(frozen=True)
class Turn:
    """One step of one rank: wall time, CPU time, and the time of each action."""

    seconds: float
    cpu_seconds: float
    timed_actions: tuple[TimedAction, ...] = ()


Step = Callable[[], Any]
# Each rank keeps its steps between turns: built once, run often.
_STEPS: dict[str, Step] = {}


def model(shape: Shape) -> Stack:
    return initialize(Stack([LSTM(shape.hidden, shape.hidden) for _ in range(shape.layers)]), seed=1)


def data(shape: Shape) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(shape.window, shape.rows, shape.hidden, generator=generator) for _ in range(2))  # type: ignore[return-value]


def window(shape: Shape, share: int = 0, count: int = 1) -> Window:
    x, targets = data(shape)
    lengths, fresh = torch.full((shape.rows,), shape.window), torch.ones(shape.rows, dtype=torch.bool)
    whole = Window(shape.window, torch.arange(shape.rows), lengths, fresh, x, targets)
    return whole[shape.rows * share // count : shape.rows * (share + 1) // count]


def plain_loss(y: Tensor, targets: Tensor) -> LossSum:
    """The same loss for every contender, since engines are compared."""
    return LossSum((y - targets).square().sum(), torch.tensor(y.numel()))


def stretto_step(world: World, shape: Shape, layout: Layout) -> Step:
    engine = make_engine(model(shape), plain_loss, layout, world)
    batch = window(shape, engine.mesh.replica, layout.replicas)

    def step() -> list[TimedAction]:
        if isinstance(engine, PipelineEngine):
            engine.recorder.start()
        engine.step(batch, None, 0)
        return engine.recorder.stop()

    return step


def local_step(world: World, shape: Shape) -> Step:
    engine, batch = LocalEngine(model(shape), plain_loss), window(shape)
    return lambda: engine.step(batch, None, 0)


class ContiguousGradient(torch.autograd.Function):
    """The identity, with a contiguous gradient, which torch's pipelining needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ANN401
        return gradients[0].contiguous()


class BatchFirst(nn.Module):
    """A stage as torch's pipelining needs it: batch first, contiguous input and output."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self.cells = nn.ModuleList(block.cell for block in stack if isinstance(block, LSTM))

    def forward(self, x: Tensor) -> Tensor:
        x = ContiguousGradient.apply(x).transpose(0, 1).contiguous()  # type: ignore[no-untyped-call]
        for cell in self.cells:
            x, _ = cell(x)
        return x.transpose(0, 1).contiguous()


def torch_pipelining_step(world: World, shape: Shape, kind: str, num_micro_batches: int) -> Step:
    half = shape.layers // 2
    stage = BatchFirst(model(shape)[half * world.rank : half * (world.rank + 1)])
    x, targets = (tensor.transpose(0, 1).contiguous() for tensor in data(shape))
    schedule_kind = ScheduleGPipe if kind == "GPipe" else Schedule1F1B
    size = (shape.rows // num_micro_batches, shape.window, shape.hidden)
    before, after = torch.empty(size, requires_grad=world.rank == 1), torch.empty(size, requires_grad=True)
    pipeline = PipelineStage(stage, world.rank, 2, torch.device("cpu"), input_args=before, output_args=after)
    schedule = schedule_kind(
        pipeline, num_micro_batches, loss_fn=lambda y, t: (y - t).square().sum(), scale_grads=False
    )

    def step() -> None:
        stage.zero_grad()
        if world.rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=targets)

    return step


def ddp_step(world: World, shape: Shape) -> Step:
    """Plain DistributedDataParallel."""
    wrapped = DistributedDataParallel(BatchFirst(model(shape)))
    x, targets = (tensor.transpose(0, 1).contiguous() for tensor in data(shape))
    rows = slice(shape.rows * world.rank // world.size, shape.rows * (world.rank + 1) // world.size)
    x, targets = x[rows], targets[rows]

    def step() -> None:
        wrapped.zero_grad()
        (wrapped(x) - targets).square().sum().backward()

    return step


def take_turn(world: World, name: str, build: Callable[..., Step], arguments: tuple[Any, ...]) -> Turn:
    if name not in _STEPS:
        _STEPS[name] = build(world, *arguments)
        _STEPS[name]()
    if world.size > 1:
        dist.barrier()
    started, cpu_started = time.perf_counter(), time.process_time()
    timed_actions = _STEPS[name]()
    cpu_seconds = time.process_time() - cpu_started
    seconds = time.perf_counter() - started
    return Turn(seconds, cpu_seconds, tuple(timed_actions) if isinstance(timed_actions, list) else ())


@dataclass(frozen=True)
class Contender:
    name: str
    size: int
    build: Callable[..., Step]
    arguments: tuple[Any, ...]
    copies: int = 1  # unconnected worlds that run at the same time

    @property
    def kind(self) -> str:
        """The name without numbers of chunks or micro-batches. Contenders of a kind share ranks, to save memory."""
        return self.name.split(",")[0]


def contenders(
    shape: Shape, chunks: list[int], interleaved_chunks: list[int], micro_batches: list[int]
) -> list[Contender]:
    half = Shape(shape.layers, shape.hidden, shape.rows // 2, shape.window)
    best = 8
    return [
        Contender("one device", 1, local_step, (shape,)),
        *(Contender(f"2 stages, {n} chunks", 2, stretto_step, (shape, Layout(stages=2, chunks=n))) for n in chunks),
        *(
            Contender(f"2 interleaved, {n} chunks", 2, stretto_step, (shape, Layout(stages=2, interleave=2, chunks=n)))
            for n in interleaved_chunks
        ),
        *(
            Contender(f"torch {kind}, {n} micro-batches", 2, torch_pipelining_step, (shape, kind, n))
            for kind in ("GPipe", "1F1B")
            for n in micro_batches
        ),
        Contender("2 replicas", 2, stretto_step, (shape, Layout(replicas=2))),
        Contender("DDP by hand", 2, ddp_step, (shape,)),
        Contender("2 x 2 hybrid", 4, stretto_step, (shape, Layout(replicas=2, stages=2, chunks=best))),
        Contender("two unconnected 1 x 2", 2, stretto_step, (half, Layout(stages=2, chunks=best)), copies=2),
    ]


Turns = dict[str, list[list[Turn]]]


def best_contenders(listed: list[Contender], turns: Turns) -> list[Contender]:
    """Keep the two fastest of contenders that differ only in a number, and all others."""
    numbered = ("2 stages", "2 interleaved", "torch")
    kept = [contender for contender in listed if not contender.name.startswith(numbered)]
    for kind in numbered:
        alike = [contender for contender in listed if contender.name.startswith(kind)]
        kept += sorted(alike, key=lambda contender: best_seconds(turns[contender.name]))[:2]
    return kept


def best_seconds(turns: list[list[Turn]]) -> float:
    """Return the seconds of the fastest turn, each as slow as its slowest rank."""
    return min(max(rank.seconds for rank in turn) for turn in turns)


def measure(listed: list[Contender], pools: PausedPools, rounds: int, before: Turns | None = None) -> Turns:
    """Run the contenders in turns, as long as there is time; return, for each, its turns on every rank."""
    turns: Turns = {contender.name: [] for contender in listed} if before is None else before
    for index in track(range(rounds), "taking turns", console=Console(stderr=True), transient=True):
        if time.monotonic() - _STARTED > MAX_SECONDS:
            break
        for contender in listed if index % 2 else reversed(listed):
            turns[contender.name].append(_run_copies(contender, pools))
    return turns


def _run_copies(contender: Contender, pools: PausedPools) -> list[Turn]:
    for copy in range(contender.copies):
        pools.start((contender.kind, copy), contender.size)

    def run(copy: int) -> list[Turn]:
        arguments = (contender.name, contender.build, contender.arguments)
        return pools.run((contender.kind, copy), contender.size, take_turn, *arguments, seconds=60)

    with ThreadPoolExecutor(contender.copies) as threads:
        return [turn for turns in threads.map(run, range(contender.copies)) for turn in turns]


def simulated(turns: list[list[Turn]], num_chunks: int, link: float) -> tuple[Timeline, float]:
    """Simulate two stages with measured chunk times; return the timeline, and the median of simulated / measured."""
    ratios = []
    for turn in turns:
        costs = {(timed.stage, timed.action): timed.stop - timed.start for rank in turn for timed in rank.timed_actions}

        def cost(stage: int, action: Action, costs: dict[tuple[int, Action], float] = costs) -> float:
            return costs[stage, action]

        schedules = [stage_schedule(stage, 2, 1, num_chunks) for stage in range(2)]
        timeline = simulate(schedules, cost, lambda stage, action: link)
        ratios.append(timeline.seconds / max(rank.seconds for rank in turn))
    return timeline, statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description="The wavefront compared with other ways to train on two devices.")
    parser.add_argument("--quick", action="store_true", help="finish within a minute, with coarser figures")
    parser.add_argument("--svg", type=Path, help="draw the timeline of the best number of chunks")
    options = parser.parse_args()
    shape = Shape(window=48) if options.quick else Shape()
    chunks = [8] if options.quick else [6, 8, 12, 16, 32]
    # With two runs of layers per stage, fewer and longer chunks do.
    interleaved_chunks = [6] if options.quick else [4, 6, 8]
    listed = contenders(shape, chunks, interleaved_chunks, [4] if options.quick else [2, 4, 8])
    pools = PausedPools()
    turns = measure(listed, pools, 2)
    # Then only those that can still be fastest, more often, since the machine is noisy.
    turns = measure(best_contenders(listed, turns), pools, 0 if options.quick else 12, turns)
    seconds = {name: best_seconds(turns_of_name) for name, turns_of_name in turns.items()}
    cpu = {name: min(sum(rank.cpu_seconds for rank in turn) for turn in turns[name]) for name in turns}

    best_chunks = min(chunks, key=lambda n: seconds[f"2 stages, {n} chunks"])
    best = f"2 stages, {best_chunks} chunks"
    best_torch = min(value for name, value in seconds.items() if name.startswith("torch"))
    link = pools.run(("2 stages", 0), 2, ping, shape.hidden * shape.rows * shape.window // best_chunks)[0]
    pools.close()
    timeline, ratio = simulated(turns[best], best_chunks, link)
    print(draw_text(timeline))
    if options.svg:
        title = f"{best}: measured chunks, {timeline.seconds:.2f} s per step"
        picture = gantt(title, stage_names(timeline), bars_from_timeline(timeline))
        options.svg.write_text(picture.to_svg())
    one = seconds["one device"]
    best_interleaved = min(value for name, value in seconds.items() if name.startswith("2 interleaved"))
    show(
        f"{shape.layers} LSTM layers, H={shape.hidden}, {shape.rows} rows, window {shape.window}, fp32, gloo",
        ["contender", "seconds per step", "over one device", "CPU seconds"],
        [[name, f"{value:.3f}", f"{one / value:.2f}", f"{cpu[name]:.2f}"] for name, value in seconds.items()],
        {
            "stages2_over_one": one / min(seconds[best], best_interleaved),
            "interleaved_over_plain": seconds[best] / best_interleaved,
            "stages2_over_torch_pipelining": best_torch / seconds[best],
            "replicas_over_ddp": seconds["DDP by hand"] / seconds["2 replicas"],
            "hybrid_cost": cpu["2 x 2 hybrid"] / cpu["two unconnected 1 x 2"],
            "simulated_over_measured": ratio,
            "best_chunks": best_chunks,
        },
    )


if __name__ == "__main__":
    main()
