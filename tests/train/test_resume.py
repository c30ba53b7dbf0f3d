"""The resume law: what happens after step n depends only on what was saved at step n, in whatever layout."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.layout_cases import MODELS, NUM_TOKENS, Case, RandomWindows, run_single_device
from helpers.rank_pool import RankPools
from helpers.short_params import some_short
from stretto import CheckpointManager, Layout, TrainConfig, Trainer, World, make_engine
from stretto.base.position import Position
from stretto.data import Corpus, Lanes
from stretto.errors import ConfigError
from stretto.nn import LSTM, CrossEntropy, Embedding, Linear, Stack

TO_ONE_DEVICE = [(2, 2), (1, 4), (4, 1), (1, 1)]  # replicas, stages
TO_ANY_NUMBER = [(2, 2), (2, 1), (1, 3), (1, 1)]
OPTIMIZERS: dict[str, dict[str, object]] = {
    "adamw": {"weight_decay": 0.1},
    "sgd": {"options": {"momentum": 0.9}},
}


@dataclass(frozen=True)
class TrainingResult:
    """What a rank has after some steps."""

    losses: list[float]
    position: Position
    tensors: dict[str, Tensor]


def train(
    world: World, folder: Path, case: Case, layout: Layout, stop: int, optimizer: str = "sgd", zero_lanes: bool = False
) -> TrainingResult:
    """Resume from the checkpoints in a folder, train up to a step, and save there."""
    model = Stack(MODELS[case.model]()).to(case.dtype)
    engine = make_engine(model, CrossEntropy(), layout, world, seed=3)
    config = TrainConfig.model_validate(
        {"steps": 100, "lr": 0.05, "optimizer": optimizer, "clip": 0.5, **OPTIMIZERS[optimizer]}
    )
    data = RandomWindows(case)
    trainer = Trainer(engine, data, config, seed=case.seed)
    with CheckpointManager(folder, world) as checkpoints:
        saved = checkpoints.start()
        if saved is not None:
            trainer.restore(saved)
        if zero_lanes and trainer.state is not None:
            trainer.state = tuple(torch.zeros_like(tensor) for tensor in trainer.state)
        losses = []
        while trainer.step < stop:
            losses.append(trainer.advance().loss)
        snapshot = trainer.snapshot()
        checkpoints.save(snapshot, wait=True)
    # All that it holds, not only what it writes.
    tensors = {f"weights.{name}": tensor for name, tensor in engine.stack.state_dict().items()}
    tensors |= {piece.name: piece.tensor for piece in snapshot.shards}
    return TrainingResult(losses, trainer.position, {name: tensor.detach().clone() for name, tensor in tensors.items()})


def layout_of(grid: tuple[int, int]) -> Layout:
    return Layout(replicas=grid[0], stages=grid[1], chunks=3 if grid[1] > 1 else 1, micro_batches=2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        pytest.param("lstm", "adamw", marks=pytest.mark.short),
        ("lstm", "sgd"),
        ("custom_blocks", "adamw"),
    ],
)
@pytest.mark.parametrize("grids", [TO_ONE_DEVICE, TO_ANY_NUMBER], ids=["to one device", "to any number"])
def test_a_run_resumed_in_other_layouts_has_the_same_curve(
    grids: list[tuple[int, int]], model: str, optimizer: str, pools: RankPools, tmp_path: Path
) -> None:
    case = Case(model=model, num_rows=9, num_steps=12)
    alone = pools[1].run(train, tmp_path / "alone", case, Layout(), 12, optimizer)[0]
    losses: list[float] = []
    for number, grid in enumerate(grids, 1):
        told = pools[grid[0] * grid[1]].run(train, tmp_path / "run", case, layout_of(grid), 3 * number, optimizer)
        losses += told[0].losses
        assert all(one.losses == told[0].losses and one.position == told[0].position for one in told)
    assert losses == pytest.approx(alone.losses, rel=1e-9)
    assert told[0].position == alone.position
    assert told[0].tensors.keys() == alone.tensors.keys()
    for name, tensor in alone.tensors.items():
        assert torch.allclose(told[0].tensors[name].double(), tensor.double(), rtol=1e-7, atol=1e-10), name


@pytest.mark.long
@pytest.mark.short
def test_losing_the_state_of_the_lanes_changes_the_curve(pools: RankPools, tmp_path: Path) -> None:
    """The test above can fail: the states of the lanes are what it depends on."""
    case = Case(num_rows=9, num_steps=12)
    expected = run_single_device(case)
    assert expected.losses
    alone = pools[1].run(train, tmp_path / "alone", case, Layout(), 6)[0]
    first = pools[4].run(train, tmp_path / "run", case, layout_of((2, 2)), 3)[0]
    second = pools[2].run(train, tmp_path / "run", case, layout_of((2, 1)), 6, "sgd", True)[0]
    with pytest.raises(AssertionError):
        assert first.losses + second.losses == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("grid", "optimizer"),
    some_short([((2, 2), optimizer) for optimizer in OPTIMIZERS])
    + some_short([((1, 2), "adamw"), ((1, 1), "adamw"), ((2, 1), "adamw"), ((3, 1), "adamw")], 2),
    ids=str,
)
def test_a_run_resumed_in_the_same_layout_has_the_same_bits(
    grid: tuple[int, int], optimizer: str, pools: RankPools, tmp_path: Path
) -> None:
    case = Case(num_rows=9, num_steps=12, dtype=torch.float32)
    layout = layout_of(grid)
    ranks = pools[layout.num_ranks]
    whole = ranks.run(train, tmp_path / "whole", case, layout, 8, optimizer)
    parts = [ranks.run(train, tmp_path / "parts", case, layout, stop, optimizer) for stop in (3, 4, 8)]
    for rank in range(layout.num_ranks):
        assert [loss for part in parts for loss in part[rank].losses] == whole[rank].losses
        assert parts[-1][rank].tensors.keys() == whole[rank].tensors.keys()
        for name, tensor in whole[rank].tensors.items():
            assert torch.equal(parts[-1][rank].tensors[name], tensor), name


def test_a_run_with_a_custom_optimizer_resumes_with_the_same_bits(byte_corpus: Corpus, tmp_path: Path) -> None:
    def losses(folder: Path, stop: int) -> list[float]:
        model = Stack([Embedding(256, 8), LSTM(8, 8), Linear(8, 256)])
        engine = make_engine(model, CrossEntropy(), seed=3)
        config = TrainConfig(steps=8, warmup=2)
        # Adafactor keeps less than one value per weight.
        trainer = Trainer(engine, Lanes(byte_corpus, 4, 20), config, optimizer=torch.optim.Adafactor)
        with CheckpointManager(folder) as checkpoints:
            saved = checkpoints.start()
            if saved is not None:
                trainer.restore(saved)
            reports = [trainer.advance().loss for _ in range(trainer.step, stop)]
            checkpoints.save(trainer.snapshot(), wait=True)
        return reports

    expected = losses(tmp_path / "whole", 8)
    assert losses(tmp_path / "parts", 3) + losses(tmp_path / "parts", 8) == expected


def test_optimizer_state_that_can_not_be_saved_is_refused(byte_corpus: Corpus) -> None:
    class CountingSGD(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            super().step()
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1

    model = Stack([Embedding(256, 8), LSTM(8, 8), Linear(8, 256)])
    engine = make_engine(model, CrossEntropy(), seed=3)
    trainer = Trainer(engine, Lanes(byte_corpus, 4, 20), TrainConfig(steps=2), optimizer=CountingSGD)
    trainer.advance()
    with pytest.raises(ConfigError, match=r"the optimizer's 'count' for .* is of type int, which can't be saved"):
        trainer.snapshot()


def test_a_different_seed_or_optimizer_is_refused(pools: RankPools, tmp_path: Path) -> None:
    world = World(0, 1, torch.device("cpu"))
    case = Case(num_rows=4, num_steps=3)
    train(world, tmp_path, case, Layout(), 2)
    with pytest.raises(ConfigError, match=r"optimizer=AdamW, but .* was saved with optimizer=SGD; use that optimizer"):
        train(world, tmp_path, case, Layout(), 3, "adamw")
    with pytest.raises(ConfigError, match=r"seed=77, but .* was saved with seed=\d+; use that seed"):
        train(world, tmp_path, Case(num_rows=4, num_steps=3, seed=77), Layout(), 3)


def train_wide(world: World, folder: Path, stop: int) -> list[Tensor]:
    """A model whose gradients fill several of the reducer's buckets."""
    blocks = [Embedding(NUM_TOKENS, 256), LSTM(256, 256), LSTM(256, 256), Linear(256, NUM_TOKENS)]
    engine = make_engine(Stack(blocks), CrossEntropy(), Layout(replicas=3), world, seed=3)
    case = Case(num_rows=6, window=6)
    trainer = Trainer(engine, RandomWindows(case), TrainConfig(steps=100, lr=0.01))
    with CheckpointManager(folder, world) as checkpoints:
        saved = checkpoints.start()
        if saved is not None:
            trainer.restore(saved)
        while trainer.step < stop:
            trainer.advance()
        checkpoints.save(trainer.snapshot(), wait=True)
    return [parameter.detach().clone() for parameter in engine.stack.parameters()]


def test_three_replicas_reduce_in_the_same_order_after_a_resume(pools: RankPools, tmp_path: Path) -> None:
    whole = pools[3].run(train_wide, tmp_path / "whole", 4)
    pools[3].run(train_wide, tmp_path / "parts", 2)
    for one, other in zip(pools[3].run(train_wide, tmp_path / "parts", 4), whole, strict=True):
        assert all(torch.equal(weight, expected) for weight, expected in zip(one, other, strict=True))
