"""Every task on arrays equals a loop written by hand, in any layout, also when resumed in another one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pytest import TempPathFactory
from torch import Tensor
from torch import nn as torch_nn

from helpers.rank_pool import RankPools
from helpers.short_params import some_short
from stretto import CheckpointManager, Layout, TrainConfig, Trainer, World, evaluate, make_engine
from stretto.blocks.pooling import Pooling
from stretto.data import ArrayItems, Batches, Position, from_arrays
from stretto.errors import DataError
from stretto.nn import (
    LSTM,
    BidirectionalLSTM,
    Block,
    FinalStates,
    Linear,
    Loss,
    MaxPool,
    MeanPool,
    Stack,
    initialize,
)
from stretto.serve import predict_arrays
from stretto.testing import verify

NUM_ROWS, NUM_STEPS, NUM_OUTPUTS, BATCH = 24, 6, 3, 8
# Replicas and stages. Hypothesis begins with the first, so one rank, which shows least, is the last.
NUM_RANKS = [(1, 2), (2, 1), (2, 2), (1, 1)]


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


def causal() -> list[Block]:
    return [LSTM(2, 5), LSTM(5, 5), Linear(5, NUM_OUTPUTS)]


def bidirectional(pooling: type[Pooling]) -> list[Block]:
    return [BidirectionalLSTM(2, 3), pooling(6), Linear(6, NUM_OUTPUTS)]


TASKS: dict[str, tuple[str, Callable[[], list[Block]]]] = {
    "class of a row": ("class_per_row", causal),
    "regression": ("values_per_row", causal),
    "tagging": ("class_per_step", causal),
    "values of each time step": ("values_per_step", causal),
    "class of a row, from the final states of both directions": ("class_per_row", partial(bidirectional, FinalStates)),
    "class of a row, from the mean of both directions": ("class_per_row", partial(bidirectional, MeanPool)),
    "class of a row, from the maximum of both directions": ("class_per_row", partial(bidirectional, MaxPool)),
}


@dataclass(frozen=True)
class Job:
    """One of the tasks, with its data and model."""

    task: str
    is_ragged: bool = True

    @property
    def arrays(self) -> Arrays:
        return Arrays(TASKS[self.task][0], self.is_ragged)

    def model(self) -> Stack:
        return Stack(TASKS[self.task][1]()).double()


CONFIG = TrainConfig(steps=7, lr=1e-2, clip=0, schedule="constant", optimizer="sgd")


def outputs_by_hand(stack: Stack, x: Tensor) -> Tensor:
    """Outputs `[time, outputs]` for one row `[time, channels]`; those at the last time step belong to the row."""
    first, second, last = stack
    assert isinstance(first, LSTM | BidirectionalLSTM) and isinstance(last, Linear)
    y: Tensor = first.cell(x)[0]
    if isinstance(second, LSTM):
        y = second.cell(y)[0]
    elif isinstance(second, FinalStates):
        y = torch.cat([y[-1:, :3], y[:1, 3:]], dim=1)  # where each direction has read the whole row
    else:
        y = y.mean(0, keepdim=True) if isinstance(second, MeanPool) else y.max(0, keepdim=True).values
    outputs: Tensor = last.module(y)
    return outputs


def run_by_hand(job: Job) -> tuple[list[float], dict[str, Tensor]]:
    """One row at a time, without padding; the mean over all valid targets of a batch."""
    stack, arrays, batches = initialize(job.model(), 1), job.arrays, job.arrays.batches
    optimizer = torch.optim.SGD(stack.parameters(), lr=1e-2)
    position, losses = Position(), []
    for _ in range(7):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for index in batches.order.batch(position).indices:
            y = outputs_by_hand(stack, torch.from_numpy(arrays.inputs[index]))
            target = torch.from_numpy(arrays.targets[index])
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


def train(world: World, job: Job, layout: Layout, folder: Path, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Resume from the folder's checkpoint, if there is one, take some steps and save; return losses and weights."""
    engine = make_engine(job.model(), job.arrays.loss, layout, world, seed=1)
    trainer = Trainer(engine, job.arrays.batches, CONFIG)
    with CheckpointManager(folder, world) as checkpoints:
        checkpoint = checkpoints.start()
        if checkpoint is not None:
            trainer.restore(checkpoint)
        losses = [trainer.advance().loss for _ in range(steps)]
        checkpoints.save(trainer.snapshot(), wait=True)
    return losses, {name: value.detach().clone() for name, value in engine.stack.state_dict().items()}


def find_difference(world: World, job: Job, layout: Layout) -> str:
    """What `verify` finds; empty if there is no difference."""
    loss: Loss = job.arrays.loss
    verification = verify(job.model(), loss, job.arrays.batches, layout, world, num_steps=2)
    return "" if verification.is_equal else verification.verdict


def run(pools: RankPools, layout: Layout, function: Callable[..., Any], *arguments: object) -> list[Any]:
    """Call a function on every rank of a layout; a single rank is this process."""
    if layout.num_ranks == 1:
        return [function(World(rank=0, size=1, device=torch.device("cpu")), *arguments)]
    return pools[layout.num_ranks].run(function, *arguments)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    replicas, stages = draw(st.sampled_from(NUM_RANKS))
    return Layout(
        replicas=replicas,
        stages=stages,
        micro_batches=draw(st.integers(1, 3)),
        chunks=draw(st.integers(1, 4)),
        recompute=draw(st.booleans()),
    )


@pytest.mark.long
@pytest.mark.parametrize("task", some_short(TASKS, 3))
@given(is_ragged=st.booleans(), first=layouts(), second=layouts())
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_task_equals_a_loop_by_hand_also_when_resumed_in_any_other_layout(
    task: str, is_ragged: bool, first: Layout, second: Layout, pools: RankPools, tmp_path_factory: TempPathFactory
) -> None:
    job, folder = Job(task, is_ragged), tmp_path_factory.mktemp("run")
    losses, weights = run_by_hand(job)
    for rank_losses, _ in run(pools, first, train, job, first, folder, 4):
        assert rank_losses == pytest.approx(losses[:4], rel=1e-9)
    for rank_losses, rank_weights in run(pools, second, train, job, second, folder, 3):
        assert rank_losses == pytest.approx(losses[4:], rel=1e-9)
        for name, value in rank_weights.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-9, atol=1e-9)
    assert set(run(pools, second, find_difference, job, second)) == {""}


def model() -> Stack:
    return Stack(causal()).double()


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


def test_items_and_their_inputs_are_predicted_like_their_arrays() -> None:
    arrays = Arrays("class_per_row")
    stack = model()
    expected = np.array(predict_arrays(stack, arrays.inputs))
    for inputs in (arrays.items, arrays.items.inputs):
        np.testing.assert_array_equal(np.array(predict_arrays(stack, inputs, max_rows=5)), expected)
        with pytest.raises(DataError, match="lengths can't be combined with inputs that have lengths of their own"):
            predict_arrays(stack, inputs, lengths=[1] * NUM_ROWS)


def test_one_row_without_a_dim_of_rows_is_refused() -> None:
    stack = Stack([LSTM(8, 4)])
    with pytest.raises(DataError, match=r"1 channel per time step, .* needs 8; if x is one row, pass \[x\]"):
        predict_arrays(stack, np.zeros((20, 8)))
    assert np.shape(predict_arrays(stack, [np.zeros((20, 8))])) == (1, 4)


def test_class_weights_divide_by_the_weights_of_the_targets() -> None:
    arrays, weights = Arrays("class_per_row"), torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    engine = make_engine(model(), torch_nn.CrossEntropyLoss(weights), Layout(micro_batches=2, chunks=2), seed=1)
    outputs, labels = predict_arrays(engine.stack, arrays.inputs), torch.from_numpy(np.array(arrays.targets))
    expected = F.cross_entropy(torch.from_numpy(np.array(outputs)), labels, weights)
    assert evaluate(engine, arrays.batches).loss == pytest.approx(float(expected), rel=1e-12)
    trainer = Trainer(engine, Batches(arrays.items, max_rows=NUM_ROWS), CONFIG)
    assert trainer.advance().loss == pytest.approx(float(expected), rel=1e-12)


def test_a_trainer_says_what_to_make_of_rows_and_loaders() -> None:
    items: Any = Arrays("class_per_row").items
    engine = make_engine(model(), torch_nn.CrossEntropyLoss(), seed=1)
    loader: Any = torch.utils.data.DataLoader([(1, 2)])  # type: ignore[arg-type]
    cases: list[tuple[Any, str]] = [(items, "wrap its rows in .*Batches"), (loader, r"from_dataset\(loader.dataset")]
    for windows, remedy in cases:
        with pytest.raises(DataError, match=remedy):
            Trainer(engine, windows, CONFIG)
