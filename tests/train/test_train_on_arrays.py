"""Training on arrays equals a loop written by hand, in any layout, also when resumed in another one."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn as torch_nn

from helpers.rank_pool import RankPools
from stretto import CheckpointManager, Layout, TrainConfig, Trainer, World, evaluate, make_engine
from stretto.data import ArrayItems, Batches, Position, from_arrays
from stretto.nn import LSTM, Linear, Loss, Stack, initialize
from stretto.serve import predict_arrays
from stretto.testing import verify

KINDS = ("class_per_row", "values_per_row", "class_per_step", "values_per_step")
NUM_ROWS, NUM_STEPS, NUM_OUTPUTS, BATCH = 24, 6, 3, 8
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]  # replicas, stages


@dataclass(frozen=True)
class Arrays:
    """Rows of different lengths with targets of one kind, some of which are missing."""

    kind: str
    is_ragged: bool = True
    inputs: list[NDArray[Any]] = field(init=False)
    targets: list[NDArray[Any]] = field(init=False)

    def __post_init__(self) -> None:
        draw = np.random.default_rng(3)
        lengths = draw.integers(1, NUM_STEPS + 1, NUM_ROWS) if self.is_ragged else [NUM_STEPS] * NUM_ROWS
        inputs = [draw.normal(size=(length, 2)) for length in lengths]
        shapes = [() if self.kind.endswith("row") else (length,) for length in lengths]
        targets: list[NDArray[Any]]
        if self.kind.startswith("class"):
            targets = [np.array(draw.integers(NUM_OUTPUTS, size=shape)) for shape in shapes]
            missing: float = -100
        else:
            targets = [draw.normal(size=(*shape, NUM_OUTPUTS)) for shape in shapes]
            missing = np.nan
        for row in (2, 5):
            targets[row][...] = missing
        object.__setattr__(self, "inputs", inputs)
        object.__setattr__(self, "targets", targets)

    @property
    def items(self) -> ArrayItems:
        kind: Any = self.kind
        return from_arrays(self.inputs, self.targets, target_kind=kind, classes=NUM_OUTPUTS)

    @property
    def batches(self) -> Batches:
        return Batches(self.items, max_rows=BATCH, seed=4)

    @property
    def loss(self) -> torch_nn.Module:
        return torch_nn.CrossEntropyLoss() if self.kind.startswith("class") else torch_nn.MSELoss()


def model() -> Stack:
    return Stack([LSTM(2, 5), LSTM(5, 5), Linear(5, NUM_OUTPUTS)]).double()


CONFIG = TrainConfig(steps=7, lr=1e-2, clip=0, schedule="constant", optimizer="sgd")


def run_by_hand(arrays: Arrays) -> tuple[list[float], dict[str, torch.Tensor]]:
    """One row at a time, without padding; the mean over all valid targets of a batch."""
    stack, batches = initialize(model(), 1), arrays.batches
    first, second, last = stack
    assert isinstance(first, LSTM) and isinstance(second, LSTM) and isinstance(last, Linear)
    optimizer = torch.optim.SGD(stack.parameters(), lr=1e-2)
    position, losses = Position(), []
    for _ in range(7):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for index in batches.order.batch(position).indices:
            x = torch.from_numpy(arrays.inputs[index]).unsqueeze(1)
            x = second.cell(first.cell(x)[0])[0]
            y, target = last.module(x).squeeze(1), torch.from_numpy(arrays.targets[index])
            if arrays.kind.endswith("row"):
                y, target = y[-1:], target.unsqueeze(0)
            if arrays.kind.startswith("class"):
                total = total + F.cross_entropy(y, target, ignore_index=-100, reduction="sum")
                count += int((target != -100).sum())
            elif not bool(target.isnan().any()):
                total = total + (y - target).square().sum()
                count += target.numel()
        optimizer.zero_grad()
        torch.autograd.backward([total / count])
        optimizer.step()
        losses.append(float(total.detach()) / count)
        position = batches.next_position(position)
    return losses, {name: value.detach() for name, value in stack.state_dict().items()}


def train(world: World, arrays: Arrays, layout: Layout) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = make_engine(model(), arrays.loss, layout, world, seed=1)
    trainer = Trainer(engine, arrays.batches, CONFIG)
    return [report.loss for report in trainer], {n: p.detach() for n, p in engine.stack.state_dict().items()}


@pytest.mark.long
@pytest.mark.short
@given(
    kind=st.sampled_from(KINDS), is_ragged=st.booleans(), ranks=st.sampled_from(LAYOUTS),
    micro_batches=st.integers(1, 3), chunks=st.integers(1, 4),
)  # fmt: skip
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
def test_training_on_arrays_equals_a_loop_by_hand_in_any_layout(
    kind: str, is_ragged: bool, ranks: tuple[int, int], micro_batches: int, chunks: int, pools: RankPools
) -> None:
    arrays, layout = (
        Arrays(kind, is_ragged),
        Layout(replicas=ranks[0], stages=ranks[1], micro_batches=micro_batches, chunks=chunks),
    )
    losses, weights = run_by_hand(arrays)
    for rank_losses, rank_weights in pools[layout.num_ranks].run(train, arrays, layout):
        assert rank_losses == pytest.approx(losses, rel=1e-9)
        for name, value in rank_weights.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-9, atol=1e-9)


def train_and_save(world: World, arrays: Arrays, layout: Layout, folder: Path, steps: int) -> list[float]:
    """Resume from the folder's checkpoint, if there is one, take some steps and save."""
    engine = make_engine(model(), arrays.loss, layout, world, seed=1)
    trainer = Trainer(engine, arrays.batches, CONFIG)
    with CheckpointManager(folder, world) as checkpoints:
        checkpoint = checkpoints.start()
        if checkpoint is not None:
            trainer.restore(checkpoint)
        losses = [trainer.advance().loss for _ in range(steps)]
        checkpoints.save(trainer.snapshot(), wait=True)
    return losses


@pytest.mark.parametrize("kind", ["class_per_step", "values_per_row"])
def test_a_run_on_arrays_resumes_in_another_layout(kind: str, tmp_path: Path, pools: RankPools) -> None:
    arrays = Arrays(kind)
    losses, _ = run_by_hand(arrays)
    first = pools[2].run(train_and_save, arrays, Layout(replicas=2, micro_batches=2), tmp_path, 4)[0]
    second = pools[2].run(train_and_save, arrays, Layout(stages=2, chunks=3), tmp_path, 3)[0]
    assert [*first, *second] == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_verify_finds_no_difference(kind: str) -> None:
    arrays = Arrays(kind)
    loss: Loss = arrays.loss
    assert verify(model(), loss, arrays.batches, Layout(micro_batches=2, chunks=3), num_steps=2).is_equal


def test_predictions_are_the_outputs_that_were_trained() -> None:
    for kind in ("class_per_row", "values_per_step"):
        arrays = Arrays(kind)
        engine = make_engine(model(), arrays.loss, seed=1)
        evaluation = evaluate(engine, arrays.batches)
        per_step = kind.endswith("step")
        outputs = predict_arrays(engine.stack, arrays.inputs, per_step=per_step, max_rows=5)
        if per_step:
            errors = np.concatenate([(y - t).flatten() for y, t in zip(outputs, arrays.targets, strict=True)])
            assert np.nanmean(errors**2) == pytest.approx(evaluation.loss, rel=1e-12)
        else:
            labels = np.array(arrays.targets)
            assert evaluation.num_targets == NUM_ROWS - 2
            assert int((np.array(outputs).argmax(-1) == labels).sum()) == evaluation.num_correct


def test_class_weights_divide_by_the_weights_of_the_targets() -> None:
    arrays, weights = Arrays("class_per_row"), torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    engine = make_engine(model(), torch_nn.CrossEntropyLoss(weights), Layout(micro_batches=2, chunks=2), seed=1)
    outputs, labels = predict_arrays(engine.stack, arrays.inputs), torch.from_numpy(np.array(arrays.targets))
    expected = F.cross_entropy(torch.from_numpy(np.array(outputs)), labels, weights)
    assert evaluate(engine, arrays.batches).loss == pytest.approx(float(expected), rel=1e-12)
    trainer = Trainer(engine, Batches(arrays.items, max_rows=NUM_ROWS), CONFIG)
    assert trainer.advance().loss == pytest.approx(float(expected), rel=1e-12)
