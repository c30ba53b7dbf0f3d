"""fp16: the loss is scaled, and a step whose gradients overflow is skipped on all ranks and halves the scale."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.layout_cases import MODELS, Case, RandomWindows
from helpers.rank_pool import RankPools
from stretto import Layout, TrainConfig, Trainer, World, make_engine
from stretto.blocks.losses import Loss
from stretto.checkpoint.manager import CheckpointManager
from stretto.errors import DivergedError
from stretto.nn import CrossEntropy, LossSum, Stack
from stretto.train.loss_scale import LossScale

CASE = Case(dtype=torch.float32, precision="fp16", num_steps=12)
OVERFLOWS = (2, 3, 7)  # steps whose gradients are too large
CONFIG = TrainConfig(steps=CASE.num_steps, lr=0.1, optimizer="sgd", schedule="constant")


class LargeLoss:
    """A loss whose gradients overflow in fp16 while `factor` is large."""

    factor = 1.0

    def __call__(self, y: Tensor, targets: Tensor) -> LossSum:
        loss = CrossEntropy()(y, targets)
        return LossSum(loss.total * self.factor, loss.count)


def make_trainer(world: World, layout: Layout, loss: Loss) -> Trainer:
    model = Stack(MODELS[CASE.model]()).to(CASE.dtype)
    engine = make_engine(model, loss, layout, world, seed=3, precision="fp16")
    return Trainer(engine, RandomWindows(CASE), CONFIG, seed=CASE.seed)


def train(trainer: Trainer, loss: LargeLoss) -> list[float]:
    losses = []
    while not trainer.is_done:
        loss.factor = 2.0**30 if trainer.step in OVERFLOWS else 1.0
        losses.append(trainer.advance().loss)
    return losses


def train_layout(world: World, layout: Layout) -> tuple[list[float], int, float]:
    loss = LargeLoss()
    trainer = make_trainer(world, layout, loss)
    return train(trainer, loss), trainer.skipped, trainer.loss_scale.value


@pytest.mark.long
@pytest.mark.short
def test_overflows_shrink_the_scale_alike_in_every_layout(pools: RankPools) -> None:
    single = World(rank=0, size=1, device=torch.device("cpu"))
    losses, skipped, scale = train_layout(single, Layout())
    assert skipped == len(OVERFLOWS) and scale == 2.0**-skipped
    for layout in (Layout(stages=2, chunks=3), Layout(replicas=2)):
        for rank_losses, rank_skipped, rank_scale in pools[2].run(train_layout, layout):
            assert (rank_skipped, rank_scale) == (skipped, scale)
            assert rank_losses == pytest.approx(losses, rel=8 * 2**-11)


def test_a_resumed_run_has_the_scale_of_an_uninterrupted_one(tmp_path: Path) -> None:
    world = World(rank=0, size=1, device=torch.device("cpu"))
    loss = LargeLoss()
    whole = make_trainer(world, Layout(), loss)
    expected = train(whole, loss)
    first = make_trainer(world, Layout(), loss)
    while first.step < 5:
        loss.factor = 2.0**30 if first.step in OVERFLOWS else 1.0
        first.advance()
    with CheckpointManager(str(tmp_path), world) as checkpoints:
        checkpoints.start("never")
        checkpoints.save(first.snapshot(), wait=True)
    resumed = make_trainer(world, Layout(), loss)
    with CheckpointManager(str(tmp_path), world) as checkpoints:
        checkpoint = checkpoints.start("auto")
        assert checkpoint is not None
        resumed.restore(checkpoint)
    assert resumed.loss_scale.value == first.loss_scale.value < 1
    assert train(resumed, loss) == expected[5:]
    assert resumed.skipped == whole.skipped and resumed.loss_scale.value == whole.loss_scale.value


def test_gradients_that_no_scale_makes_finite_stop_the_run() -> None:
    class Infinite(CrossEntropy):
        def __call__(self, y: Tensor, targets: Tensor) -> LossSum:
            loss = super().__call__(y, targets)
            total = loss.total.detach() + (y.sum() * 0.0).sqrt()  # a finite loss whose gradient is not
            return LossSum(total, loss.count)

    world = World(rank=0, size=1, device=torch.device("cpu"))
    engine = make_engine(Stack(MODELS["lstm"]()), Infinite(), Layout(), world, seed=3, precision="fp16")
    trainer = Trainer(engine, RandomWindows(CASE), CONFIG.model_copy(update={"steps": 60}), seed=1)
    with pytest.raises(DivergedError, match="gradient norm nan"):
        list(trainer)
    assert trainer.skipped == 25  # 24 halvings, and then the error


def scales(verdicts: Iterator[bool]) -> list[float]:
    loss_scale = LossScale(is_dynamic=True)
    values = []
    for is_finite in verdicts:
        loss_scale.update(is_finite=is_finite)
        values.append(loss_scale.value)
    return values


def test_the_scale_grows_after_2000_finite_steps_in_a_row() -> None:
    values = scales(step != 1500 for step in range(6000))
    assert values[1499] == 1.0 and values[1500] == 0.5
    assert values[3499] == 0.5 and values[3500] == 1.0 and values[5500] == 2.0


def test_other_precisions_have_no_scale() -> None:
    loss_scale = LossScale(is_dynamic=False)
    loss_scale.update(is_finite=False)
    loss_scale.restore(0.5, 3)
    assert loss_scale.value == 1.0 and not loss_scale.can_shrink
