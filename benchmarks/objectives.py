"""What a loss over whole rows costs in a pipeline, beside its own computation: CTC against a loss per time step.

    python benchmarks/objectives.py [--quick]

Two stages, 8 chunks, one thread per rank, on gloo. The same model is trained with both losses, in turns; each loss is
timed alone on the last stage's rank, forward and backward, while the other rank sleeps. What remains of a step without
its loss is the wavefront: `ctc_cost` is that of CTC over that of the loss per time step, the median over all rounds.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import Tensor

from stretto import Layout, World, make_engine
from stretto.data import Window
from stretto.nn import LSTM, CrossEntropy, CTCLoss, Linear, Stack
from timing import parse_quick, show

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.rank_pool import RankPool

NUM_CHUNKS = 8


@dataclass(frozen=True)
class Shape:
    """A speech model: log-mel features in, characters out."""

    features: int = 80
    layers: int = 4
    hidden: int = 512
    classes: int = 32
    rows: int = 16
    steps: int = 512
    symbols: int = 64


# Each rank keeps its runs between turns: built once, run often.
_RUNS: dict[str, Callable[[], object]] = {}


def batch(shape: Shape, name: str) -> Window:
    """Return rows of equal length, with a sequence of symbols per row or a class per time step."""
    generator = torch.Generator().manual_seed(1)
    num_targets = shape.symbols if name == "ctc" else shape.steps
    return Window(
        shape.steps,
        torch.arange(shape.rows),
        torch.full((shape.rows,), shape.steps),
        torch.ones(shape.rows, dtype=torch.bool),
        torch.randn(shape.steps, shape.rows, shape.features, generator=generator),
        torch.randint(1, shape.classes, (num_targets, shape.rows), generator=generator),
    )


def make_step(world: World, shape: Shape, name: str) -> Callable[[], object]:
    """Return one training step of this rank's stage."""
    sizes = [shape.features, *[shape.hidden] * shape.layers]
    layers = [LSTM(before, after) for before, after in pairwise(sizes)]
    model = Stack([*layers, Linear(shape.hidden, shape.classes)])
    loss = CTCLoss() if name == "ctc" else CrossEntropy()
    engine = make_engine(model, loss, Layout(stages=2, chunks=NUM_CHUNKS), world, seed=1)
    window = batch(shape, name)
    return lambda: engine.step(window, None, 0)


def make_loss(world: World, shape: Shape, name: str) -> Callable[[], object]:
    """Return the loss alone, forward and backward, as the engine calls it; on the first stage's rank, nothing."""
    if world.rank == 0:
        return lambda: None
    window = batch(shape, name)
    assert window.targets is not None
    targets: Tensor = window.targets
    y = torch.randn(shape.steps, shape.rows, shape.classes)

    def whole_rows() -> None:
        outputs = y.detach().requires_grad_()
        CTCLoss()(outputs, targets, window.lengths).total.backward()

    def chunks() -> None:
        for outputs, labels in zip(y.chunk(NUM_CHUNKS), targets.chunk(NUM_CHUNKS), strict=True):
            loss = CrossEntropy()(outputs.detach().requires_grad_(), labels)
            loss.total.backward()  # type: ignore[no-untyped-call]

    return whole_rows if name == "ctc" else chunks


def take_turn(world: World, shape: Shape, name: str, is_step: bool) -> float:
    """Return the seconds of one run of this rank."""
    key = f"{name} {is_step}"
    if key not in _RUNS:
        _RUNS[key] = (make_step if is_step else make_loss)(world, shape, name)
        _RUNS[key]()
    dist.barrier()
    started = time.perf_counter()
    _RUNS[key]()
    return time.perf_counter() - started


def main() -> None:
    is_quick = parse_quick("What CTC costs in a pipeline, beside its own computation.")
    shape = Shape(hidden=256, steps=256) if is_quick else Shape()
    turns = [(name, is_step) for name in ("ctc", "cross_entropy") for is_step in (True, False)]
    measured: list[dict[tuple[str, bool], float]] = []  # by round: seconds of each turn
    ranks = RankPool(2)
    rounds = 15 if is_quick else 40
    for index in track(range(rounds), "Measuring", console=Console(stderr=True), transient=True):
        order = turns if index % 2 else turns[::-1]
        measured.append({turn: max(ranks.run(take_turn, shape, *turn)) for turn in order})
    ranks.close()
    # The turns of a round follow each other within seconds, so a machine that gets slower changes both alike.
    rest = {name: [turn[name, True] - turn[name, False] for turn in measured] for name in ("ctc", "cross_entropy")}
    rows = []
    for name in rest:
        columns = [[turn[name, True] for turn in measured], [turn[name, False] for turn in measured], rest[name]]
        rows.append([name, *(f"{1e3 * median(seconds):.1f}" for seconds in columns)])
    figures = {"ctc_cost": median(ctc / steps for ctc, steps in zip(*rest.values(), strict=True))}
    title = f"A step of {shape.rows} rows x {shape.steps} time steps, 2 stages, {NUM_CHUNKS} chunks (median ms)"
    show(title, ["loss", "step", "loss alone", "rest"], rows, figures)


if __name__ == "__main__":
    main()
