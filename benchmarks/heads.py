"""A softmax over 33,000 words after 2 LSTM layers on 2 ranks: the table split over stages, on one stage, or copied.

    python benchmarks/heads.py [--quick]

All contenders run in turns on the same two ranks, one thread per rank, on gloo. Pipelines of today's heads have the
output layer on the last stage, with every split of the blocks and several numbers of chunks; the fastest one counts.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stretto import Layout, World, make_engine
from stretto.data import Window
from stretto.nn import LSTM, CrossEntropy, Linear, Stack, initialize
from stretto.plan.actions import Action, ActionKind
from stretto.plan.draw import draw_text
from stretto.plan.head_schedule import head_schedule
from stretto.plan.simulator import simulate
from stretto.plan.timeline import TimedAction, Timeline
from stretto.testing import LocalEngine
from timing import parse_quick, ping, show

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.rank_pool import RankPool

NUM_WORDS, HIDDEN = 33_000, 512


@dataclass(frozen=True)
class Batch:
    """The rows and time steps of a step."""

    rows: int
    steps: int = 64

    def __str__(self) -> str:
        return f"{self.rows} x {self.steps}"


@dataclass(frozen=True)
class Turn:
    """One step of one rank: wall time, the loss on this rank, and the time of each action."""

    seconds: float
    loss: float
    timed_actions: tuple[TimedAction, ...] = ()


Step = Callable[[], tuple[float, list[TimedAction]]]
Turns = dict[str, list[list[Turn]]]
# Each rank keeps its steps between turns: built once, run often.
_STEPS: dict[tuple[str, Batch], Step] = {}


def model() -> Stack:
    return initialize(Stack([LSTM(HIDDEN, HIDDEN), LSTM(HIDDEN, HIDDEN), Linear(HIDDEN, NUM_WORDS, bias=False)]), 1)


def window(batch: Batch, share: int = 0, count: int = 1) -> Window:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch.steps, batch.rows, HIDDEN, generator=generator)
    words = torch.randint(NUM_WORDS, (batch.steps, batch.rows), generator=generator)
    lengths, fresh = torch.full((batch.rows,), batch.steps), torch.ones(batch.rows, dtype=torch.bool)
    whole = Window(batch.steps, torch.arange(batch.rows), lengths, fresh, x, words)
    return whole[batch.rows * share // count : batch.rows * (share + 1) // count]


def layout_step(world: World, batch: Batch, layout: Layout) -> Step:
    engine, data = make_engine(model(), CrossEntropy(), layout, world), window(batch)

    def step() -> tuple[float, list[TimedAction]]:
        engine.recorder.start()
        result = engine.step(data, None, 0)
        return float(result.total), engine.recorder.stop()

    return step


def one_device_step(world: World, batch: Batch) -> Step:
    """One rank computes, the other waits."""
    if world.rank > 0:
        return lambda: (0.0, [])
    engine, data = LocalEngine(model(), CrossEntropy()), window(batch)
    return lambda: (float(engine.step(data, None, 0).total), [])


class PlainModel(nn.Module):
    """The same model in plain torch; its output is the summed loss."""

    def __init__(self) -> None:
        super().__init__()
        first, second, head = model()
        assert isinstance(first, LSTM) and isinstance(second, LSTM) and isinstance(head, Linear)
        self.first, self.second, self.head = first.cell, second.cell, head.module

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        x, _ = self.first(x)
        x, _ = self.second(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), words.flatten(), reduction="sum")


def ddp_step(world: World, batch: Batch) -> Step:
    wrapped, data = DistributedDataParallel(PlainModel()), window(batch, world.rank, world.size)
    assert data.inputs is not None and data.targets is not None
    x, words = data.inputs.contiguous(), data.targets.contiguous()

    def step() -> tuple[float, list[TimedAction]]:
        wrapped.zero_grad()
        loss = wrapped(x, words)
        loss.backward()
        return float(loss.detach()), []

    return step


def take_turn(world: World, name: str, batch: Batch, build: Callable[..., Step], arguments: tuple[Any, ...]) -> Turn:
    if (name, batch) not in _STEPS:
        _STEPS[name, batch] = build(world, batch, *arguments)
        _STEPS[name, batch]()
    dist.barrier()
    started = time.perf_counter()
    loss, timed_actions = _STEPS[name, batch]()
    return Turn(time.perf_counter() - started, loss, tuple(timed_actions))


def forget(world: World) -> None:
    """Free the memory of all contenders."""
    _STEPS.clear()


def table_bytes(world: World, layout: Layout) -> float:
    """Return the bytes of this rank's part of the table and of its AdamW state, over those of a whole table."""
    engine = make_engine(model(), CrossEntropy(), layout, world)
    engine.step(window(Batch(2, 4)), None, 0)
    (table,) = [weight for name, weight in engine.stack.named_parameters() if name.startswith("blocks.2.")]
    optimizer = torch.optim.AdamW([table])
    optimizer.step()
    state = sum(value.nbytes for value in optimizer.state[table].values() if isinstance(value, Tensor))
    return (table.nbytes + state) / (3 * NUM_WORDS * HIDDEN * table.element_size())


Contender = tuple[Callable[..., Step], tuple[Any, ...]]


def contenders(chunks: list[int], splits: list[tuple[int, int]]) -> dict[str, Contender]:
    listed: dict[str, Contender] = {"one device": (one_device_step, ()), "DDP by hand": (ddp_step, ())}
    for count in chunks:
        for blocks in splits:
            layout = Layout(stages=2, chunks=count, blocks=blocks)
            listed[f"stages {blocks[0]} + {blocks[1]}, {count} chunks"] = (layout_step, (layout,))
        layout = Layout(stages=2, chunks=count, vocab_parallel=True)
        listed[f"vocabulary parallel, {count} chunks"] = (layout_step, (layout,))
    return listed


def best_seconds(turns: list[list[Turn]]) -> float:
    """Return the seconds of the fastest turn, each as slow as its slowest rank."""
    return min(max(rank.seconds for rank in turn) for turn in turns)


def finalists(turns: Turns) -> list[str]:
    """Return the names of the two fastest of each kind; a kind is a name's first word."""
    by_kind: dict[str, list[str]] = {}
    for name in sorted(turns, key=lambda name: best_seconds(turns[name])):
        by_kind.setdefault(name.split()[0], []).append(name)
    return [name for names in by_kind.values() for name in names[:2]]


def measure(pool: RankPool, batch: Batch, listed: dict[str, Contender], rounds: int) -> Turns:
    """Run the contenders in turns, after two rounds only the finalists; return, for each, its turns on every rank."""
    turns: Turns = {name: [] for name in listed}
    names = list(listed)
    for index in track(range(rounds), str(batch), console=Console(stderr=True), transient=True):
        if index == 2:
            names = finalists(turns)
        for name in names if index % 2 else reversed(names):
            build, arguments = listed[name]
            turns[name].append(pool.run(take_turn, name, batch, build, arguments, seconds=120))
    expected = sum(rank.loss for rank in turns["one device"][0])
    for name, turns_of_name in turns.items():
        loss = sum(rank.loss for rank in turns_of_name[0])
        assert abs(loss - expected) <= 1e-5 * expected, f"{name}: loss {loss}, not {expected}"
    pool.run(forget)
    return turns


def simulated(turns: list[list[Turn]], num_chunks: int, links: dict[ActionKind, float]) -> tuple[Timeline, float]:
    """Simulate the split head with measured actions; return the timeline, and the median of simulated / measured."""
    ratios = []
    for turn in turns:
        costs = {(timed.stage, timed.action): timed.stop - timed.start for rank in turn for timed in rank.timed_actions}

        def cost(stage: int, action: Action, costs: dict[tuple[int, Action], float] = costs) -> float:
            return costs[stage, action]

        schedules = [head_schedule(stage, 2, [num_chunks]) for stage in range(2)]
        timeline = simulate(schedules, cost, lambda stage, action: links[action.kind])
        ratios.append(timeline.seconds / max(rank.seconds for rank in turn))
    return timeline, statistics.median(ratios)


def fastest(seconds: dict[str, float], kind: str) -> str:
    return min((name for name in seconds if name.startswith(kind)), key=seconds.__getitem__)


def main() -> None:
    quick = parse_quick("A large softmax head: its table split over stages, on one stage, or copied.")
    chunks = [2, 4] if quick else [1, 2, 4, 8]
    splits = [(1, 2)] if quick else [(1, 2), (2, 1)]
    many, few = Batch(32), Batch(8)
    pool = RankPool(2)
    turns = {batch: measure(pool, batch, contenders(chunks, splits), 2 if quick else 7) for batch in (many, few)}
    split = Layout(stages=2, chunks=4, vocab_parallel=True)
    memory_share = max(pool.run(table_bytes, split))
    seconds = {
        batch: {name: best_seconds(steps) for name, steps in turns_of_batch.items()}
        for batch, turns_of_batch in turns.items()
    }
    best = fastest(seconds[many], "vocabulary")
    num_chunks = int(best.split()[-2])
    positions = many.rows * many.steps // num_chunks
    hidden_link, statistics_link = pool.run(ping, positions * HIDDEN)[0], pool.run(ping, positions * 4)[0]
    pool.close()
    links = dict.fromkeys(ActionKind, hidden_link) | {ActionKind.HEAD: statistics_link}
    timeline, ratio = simulated(turns[many][best], num_chunks, links)
    print(draw_text(timeline))

    def over(batch: Batch, kind: str) -> float:
        return seconds[batch][fastest(seconds[batch], kind)] / seconds[batch][fastest(seconds[batch], "vocabulary")]

    rows = [[name, *(cell for batch in (many, few) for cell in _cells(seconds[batch], name))] for name in seconds[many]]
    show(
        f"{NUM_WORDS:,} words, 2 LSTM layers, H={HIDDEN}, fp32, gloo, 2 ranks",
        ["contender", *(column for batch in (many, few) for column in (f"s, {batch}", "over one"))],
        rows,
        {
            "vocab_over_stages": over(many, "stages"),
            "vocab_over_ddp": over(many, "DDP"),
            "vocab_over_stages_few_rows": over(few, "stages"),
            "vocab_over_ddp_few_rows": over(few, "DDP"),
            "memory_share": memory_share,
            "simulated_over_measured": ratio,
        },
    )


def _cells(seconds: dict[str, float], name: str) -> list[str]:
    return [f"{seconds[name]:.3f}", f"{seconds['one device'] / seconds[name]:.2f}"]


if __name__ == "__main__":
    main()
