"""Training on data in sections: a step equals the unsplit one, and a run resumes in any layout."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.rank_pool import RankPools
from helpers.resumed_training import resume_and_train
from helpers.small_sections import small_sections
from helpers.stores import write_series, write_tokens
from stretto import Layout, TrainConfig, Trainer, World, make_engine
from stretto.data import (
    Batches,
    DocumentLanes,
    ForecastTransform,
    LabeledItems,
    Position,
    Sequences,
    SlidingWindows,
    WindowSource,
)
from stretto.nn import (
    LSTM,
    BidirectionalLSTM,
    CrossEntropy,
    Dropout,
    Embedding,
    FinalStates,
    Linear,
    SquaredError,
    Stack,
)
from stretto.testing import Verification, verify
from stretto.windows.labeled_items import CutLabeledItems

LAYOUT = Layout(replicas=3, stages=2, micro_batches=3, chunks=2)
SPANS = Layout(replicas=3, spans=2, micro_batches=2)


def write(folder: Path) -> None:
    rows = [[token % 7 for token in range(1 + row * row % 13)] for row in range(300)]
    write_tokens(folder, [rows[:100], rows[100:]], 7, [[row % 3 for row in range(size)] for size in (100, 200)])


def batches(folder: Path) -> Batches:
    data = Batches(LabeledItems(Sequences.open(folder)), 104)
    assert data.order.pools.num_sections == 8
    return data


def model() -> Stack:
    return Stack([Embedding(7, 6), LSTM(6, 6), Dropout(0.3), LSTM(6, 5), Linear(5, 3)]).double()


def bidirectional() -> Stack:
    return Stack([Embedding(7, 6), BidirectionalLSTM(6, 4), FinalStates(8), Dropout(0.3), Linear(8, 3)]).double()


def verify_on(world: World, folder: Path, layout: Layout) -> Verification:
    with small_sections():
        stack = bidirectional() if layout.spans > 1 else model()
        return verify(stack, CrossEntropy(), batches(folder), layout, world, num_steps=3)


@dataclass(frozen=True)
class Trained:
    """What a rank has after some steps."""

    losses: list[float]
    position: Position
    weights: dict[str, Tensor]


def train(world: World, folder: Path, checkpoint_folder: Path, layout: Layout, stop: int) -> Trained:
    """Resume from the checkpoints in a folder, train up to a step, and save there."""
    with small_sections():
        engine = make_engine(model(), CrossEntropy(), layout, world, seed=3)
        trainer = Trainer(engine, batches(folder), TrainConfig(steps=100, lr=0.05, clip=0.5))
        losses = resume_and_train(trainer, checkpoint_folder, world, stop)
        weights = {name: tensor.detach().clone() for name, tensor in engine.stack.state_dict().items()}
        return Trained(losses, trainer.position, weights)


def test_a_step_on_sections_equals_the_unsplit_step_and_a_run_resumes_in_any_layout(
    pools: RankPools, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    write(data)
    with small_sections():
        shares = [batches(data).share(index, LAYOUT.replicas, LAYOUT.micro_batches) for index in range(3)]
        windows = [share.read(Position(0, 0, index)) for share in shares for index in range(3)]
        assert any((window.lanes[window.lengths > 0] >> 32 == 7).any() for window in windows), "of all sections"
        assert any(0 in window.lengths for window in windows), "there are blank rows"
    for layout in (LAYOUT, SPANS):
        for verification in pools[6].run(verify_on, data, layout):
            assert verification.is_equal, (layout, verification.verdict, verification.blocks)
    alone = World(0, 1, torch.device("cpu"))
    whole = train(alone, data, tmp_path / "whole", Layout(), 8)
    first = pools[6].run(train, data, tmp_path / "parts", LAYOUT, 4)
    second = train(alone, data, tmp_path / "parts", Layout(), 8)
    # The loss of a batch without rows is NaN: with so few batches per pool, some are empty.
    losses = torch.tensor(whole.losses, dtype=torch.float64)
    assert losses[:4].isfinite().any() and losses[4:].isfinite().any()
    resumed = torch.tensor(first[0].losses + second.losses, dtype=torch.float64)
    torch.testing.assert_close(resumed, losses, rtol=1e-9, atol=1e-12, equal_nan=True)
    assert second.position == whole.position != Position()
    torch.testing.assert_close(second.weights, whole.weights, rtol=1e-7, atol=1e-10)


def windows_of(folder: Path, kind: str) -> WindowSource:
    """Return windows of data in sections: lanes of documents, or parts of sequences."""
    sequences = Sequences.open(folder)
    data: DocumentLanes | Batches
    if kind == "lanes":
        data = DocumentLanes(sequences, 18, 4)
    elif kind == "cut":
        data = Batches(CutLabeledItems(sequences, context=5), 120)
    else:
        data = Batches(SlidingWindows(sequences, ForecastTransform.from_sequences(sequences), 4), 96)
    assert data.order.pools.num_sections > 1
    return data


def verify_kind(world: World, folder: Path, kind: str) -> Verification:
    with small_sections():
        data = windows_of(folder, kind)
        first = Linear(1, 6) if kind == "sliding" else Embedding(7, 6)
        num_outputs = {"lanes": 7, "cut": 3, "sliding": 1}[kind]
        stack = Stack([first, LSTM(6, 6), Dropout(0.3), LSTM(6, 5), Linear(5, num_outputs)]).double()
        loss = SquaredError() if kind == "sliding" else CrossEntropy()
        return verify(stack, loss, data, LAYOUT, world, num_steps=3)


@pytest.mark.parametrize("kind", ["lanes", "cut", "sliding"])
def test_a_step_on_lanes_or_parts_in_sections_equals_the_unsplit_step(
    kind: str, pools: RankPools, tmp_path: Path
) -> None:
    if kind == "sliding":
        series = [np.sin(np.arange(20 + row % 3, dtype=np.float32) + row)[:, None] for row in range(100)]
        write_series(tmp_path / "data", [series[:40], series[40:]])
    else:
        rows = [[token % 7 for token in range(1 + row * row % 13)] for row in range(300)]
        labels = [[token % 3 for row in shard for token in row] for shard in (rows[:100], rows[100:])]
        has_labels = kind == "cut"
        write_tokens(tmp_path / "data", [rows[:100], rows[100:]], 7, labels if has_labels else (), has_labels)
    for verification in pools[6].run(verify_kind, tmp_path / "data", kind):
        assert verification.is_equal, (verification.verdict, verification.blocks)
