"""Different lengths: the gradient of a batch is the sum over its sequences, one at a time and unpadded."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.rank_pool import RankPools
from helpers.stores import write_series, write_tokens
from stretto import Layout, World, make_engine
from stretto.data import (
    Batches,
    ForecastTransform,
    LabeledItems,
    NextTokenItems,
    Position,
    Sequences,
    SlidingWindows,
    Window,
)
from stretto.nn import (
    GRU,
    LSTM,
    BidirectionalLSTM,
    Block,
    CrossEntropy,
    Embedding,
    FinalStates,
    Linear,
    Loss,
    MaxPool,
    MeanPool,
    Rows,
    SquaredError,
    Stack,
    initialize,
)

NUM_TOKENS, NUM_CLASSES = 11, 30
LAYOUTS = [
    Layout(),
    Layout(micro_batches=3),
    Layout(chunks=5),
    Layout(micro_batches=2, chunks=3, recompute=True),
    Layout(replicas=2),
    Layout(replicas=3, micro_batches=2),
    Layout(stages=2, chunks=4),
    Layout(stages=2, micro_batches=3, chunks=2),
    pytest.param(Layout(replicas=2, stages=2, micro_batches=2, chunks=3), marks=pytest.mark.short),
]
KINDS = ["classes", "tokens", "values", "both ways"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    generator = np.random.default_rng(3)
    folder = tmp_path_factory.mktemp("lengths")
    lengths = np.clip(np.exp(generator.normal(2, 0.8, 60)).astype(int), 1, 40)
    rows = [generator.integers(0, NUM_TOKENS, length).tolist() for length in lengths]
    labels = generator.integers(0, NUM_CLASSES, 60).tolist()
    labels[0] = NUM_CLASSES - 1
    write_tokens(folder / "tokens", [rows[:25], rows[25:]], NUM_TOKENS, [labels[:25], labels[25:]])
    series = [generator.normal(size=(length, 2)).astype(np.float32) for length in (30, 45)]
    series[0][7, 1] = np.nan
    write_series(folder / "series", [series])
    return folder / "tokens", folder / "series"


def make(kind: str, folders: tuple[Path, Path]) -> tuple[Batches, Stack, Loss]:
    """Return the data, a model in float64, and a loss."""
    sequences = Sequences.open(folders[kind == "values"])
    if kind == "values":
        items = SlidingWindows(
            sequences, ForecastTransform.from_sequences(sequences, 3, season=4), 7, stride=3, every_step=True
        )
        blocks: list[Block] = [LSTM(2, 6), GRU(6, 5), Linear(5, 6)]
        return Batches(items, 60, seed=2), Stack(blocks).double(), SquaredError()
    labeled: Callable[[Sequences], LabeledItems | NextTokenItems] = NextTokenItems if kind == "tokens" else LabeledItems
    middle: list[Block] = [LSTM(6, 6), GRU(6, 6)]
    if kind == "both ways":
        middle = [BidirectionalLSTM(6, 3), FinalStates(6)]
    elif kind == "classes":
        middle = [LSTM(6, 6), MeanPool(6), GRU(6, 6), MaxPool(6)]
    num_outputs = NUM_TOKENS if kind == "tokens" else NUM_CLASSES
    stack = Stack([Embedding(NUM_TOKENS, 6), *middle, Linear(6, num_outputs)]).double()
    return Batches(labeled(sequences), 150, seed=2), stack, CrossEntropy()


def gradients_in_layout(
    world: World, kind: str, folders: tuple[Path, Path], layout: Layout, number: int
) -> tuple[float, float, dict[str, Tensor]]:
    """One step of one batch, split over ranks, rows and time."""
    data, stack, loss = make(kind, folders)
    engine = make_engine(stack, loss, layout, world, seed=5)
    share = data.share(engine.mesh.replica, layout.replicas, layout.micro_batches)
    position = Position()
    for _ in range(number):
        position = share.next_position(position)
    window = share.read(position, inputs=engine.mesh.is_first_stage, targets=engine.mesh.is_last_stage)
    result = engine.step(window, None, key=0)
    total, count = engine.mesh.world.all_reduce([float(result.total), float(result.count)])
    gradients = {name: weight.grad for name, weight in engine.stack.named_parameters() if weight.grad is not None}
    return total, count, gradients


def gradients_one_at_a_time(
    kind: str, folders: tuple[Path, Path], number: int
) -> tuple[float, float, dict[str, Tensor]]:
    """The same batch, each sequence alone and without padding; no engine, just torch."""
    data, stack, loss = make(kind, folders)
    initialize(stack, 5)
    position = Position()
    for _ in range(number):
        position = data.next_position(position)
    window = _double(data.read(position))
    assert window.inputs is not None and window.targets is not None
    total = count = 0.0
    for row, length in enumerate(window.lengths.tolist()):
        if length:
            x, targets = window.inputs[:length, row : row + 1], window.targets[:length, row : row + 1]
            y, _ = stack(x, stack.begin(Rows.of(1, length, dtype=torch.float64)))
            loss_sum = loss(y, targets)
            loss_sum.total.backward()  # type: ignore[no-untyped-call]
            total, count = total + loss_sum.total.item(), count + float(loss_sum.count)
    return total, count, {name: weight.grad for name, weight in stack.named_parameters() if weight.grad is not None}


def _double(window: Window) -> Window:
    """Return the window with real numbers in float64, to compare nine digits."""
    inputs, targets = window.inputs, window.targets
    return replace(
        window,
        inputs=inputs.double() if inputs is not None and inputs.is_floating_point() else inputs,
        targets=targets.double() if targets is not None and targets.is_floating_point() else targets,
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_batch_gives_the_sum_of_its_sequences_one_at_a_time(
    kind: str, layout: Layout, pools: RankPools, folders: tuple[Path, Path]
) -> None:
    for number in (0, 1, 3):
        total, count, expected = gradients_one_at_a_time(kind, folders, number)
        results = pools[layout.num_ranks].run(gradients_in_layout, kind, folders, layout, number)
        actual: dict[str, Tensor] = {}
        for rank_total, rank_count, gradients in results:
            assert rank_total == pytest.approx(total, rel=1e-9) and rank_count == count > 0
            actual |= gradients
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            scale = max(float(gradient.abs().max()), 1e-3)
            difference = float((actual[name] - gradient).abs().max()) / scale
            assert difference < 1e-9, f"{name} differs by {difference:.1e}"
