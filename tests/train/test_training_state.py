"""Optimizers, schedules and averages resume exactly, in the same layout and in another, and need all of their state."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.layout_cases import NUM_TOKENS, Case, RandomWindows
from helpers.rank_pool import RankPools
from stretto import Checkpoint, CheckpointManager, Layout, TrainConfig, Trainer, World, make_engine
from stretto.checkpoint import find_checkpoint
from stretto.errors import DivergedError
from stretto.nn import GRU, LSTM, CrossEntropy, Embedding, LayerNorm, Linear, Stack

CASE = Case(num_rows=4, window=5)
WHOLE, HALF = 8, 3  # steps; RAdam does not use its variance in the first ones
GROUPS = [{"match": "*.bias*", "weight_decay": 0.0}, {"match": "blocks.0.*", "lr": 0.02}]
CONFIGS: dict[str, dict[str, object]] = {
    "adadelta": {"lr": 1.0},
    "adafactor": {},
    "adagrad": {"options": {"lr_decay": 0.1}},
    "adam": {"options": {"amsgrad": True}},
    "adamax": {},
    "adamw": {"weight_decay": 0.1, "groups": GROUPS},
    "nadam": {},
    "radam": {},
    "rmsprop": {"options": {"momentum": 0.5, "centered": True}},
    "rprop": {},
    "sgd": {"options": {"momentum": 0.9, "nesterov": True}},
    "linear": {"optimizer": "sgd", "schedule": "linear", "warmup": 2},
    "inverse_sqrt": {"optimizer": "sgd", "schedule": "inverse_sqrt", "warmup": 2},
    "one_cycle": {"optimizer": "sgd", "schedule": "one_cycle"},
    "plateau": {"optimizer": "sgd", "schedule": "plateau", "plateau_patience": 2, "warmup": 2},
    "constant": {"optimizer": "sgd", "schedule": "constant", "warmup": 5},
    "ema": {"optimizer": "sgd", "average": "ema", "average_decay": 0.5},
    "swa": {"optimizer": "sgd", "average": "swa", "average_start": 2},
}
# The validation loss after each step: a plateau lowers the rate after steps 3, 5 and 7.
VALIDATION_LOSSES = [2.0, *[3.0] * (WHOLE - 1)]
# What torch counts and never uses.
UNUSED = {("adadelta", "step"), ("rmsprop", "step"), ("rprop", "step")}


@dataclass(frozen=True)
class Progress:
    """What a rank has after some steps."""

    losses: list[float]
    rates: list[float]
    tensors: dict[str, Tensor]  # all that it holds


def config_of(name: str) -> TrainConfig:
    return TrainConfig.model_validate({"steps": 20, "lr": 0.01, "clip": 0.5, **{"optimizer": name, **CONFIGS[name]}})


def make_trainer(name: str, layout: Layout, world: World) -> Trainer:
    blocks = [Embedding(NUM_TOKENS, 6), LSTM(6, 6), LayerNorm(6), GRU(6, 6), Linear(6, NUM_TOKENS)]
    engine = make_engine(Stack(blocks).double(), CrossEntropy(), layout, world, seed=3)
    return Trainer(engine, RandomWindows(CASE), config_of(name), seed=CASE.seed)


def advance(trainer: Trainer, stop: int) -> Progress:
    """Train up to a step."""
    reports = []
    while trainer.step < stop:
        reports.append(trainer.advance())
        trainer.record_score(VALIDATION_LOSSES[trainer.step - 1])
    tensors = {shard.name: shard.tensor.detach().clone() for shard in trainer.snapshot().shards}
    return Progress([report.loss for report in reports], [report.learning_rate for report in reports], tensors)


def train(world: World, folder: Path, layout: Layout, stop: int) -> dict[str, Progress]:
    """Resume each config from its checkpoint in a folder, train up to a step, and save there."""
    torch.set_num_threads(1)  # a fixture of the module is made before that of each test sets this
    progress = {}
    for name in CONFIGS:
        trainer = make_trainer(name, layout, world)
        with CheckpointManager(folder / name, world) as checkpoints:
            saved = checkpoints.start()
            if saved is not None:
                trainer.restore(saved)
            progress[name] = advance(trainer, stop)
            checkpoints.save(trainer.snapshot(), wait=True)
    return progress


def single() -> World:
    return World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("half")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Progress]:
    """Each config on one device, without a break."""
    return train(single(), tmp_path_factory.mktemp("whole"), Layout(), WHOLE)


@pytest.fixture(scope="module")
def half(folder: Path) -> dict[str, Progress]:
    """Each config on one device, up to its checkpoint."""
    return train(single(), folder, Layout(), HALF)


def restored(name: str, folder: Path) -> tuple[Trainer, Checkpoint]:
    trainer, checkpoint = make_trainer(name, Layout(), single()), find_checkpoint(folder / name)
    trainer.restore(checkpoint)
    return trainer, checkpoint


@pytest.mark.parametrize("name", CONFIGS)
def test_a_resumed_run_has_the_same_bits(
    name: str, half: dict[str, Progress], whole: dict[str, Progress], folder: Path
) -> None:
    trainer, _ = restored(name, folder)
    rest = advance(trainer, WHOLE)
    assert half[name].losses + rest.losses == whole[name].losses
    assert half[name].rates + rest.rates == whole[name].rates
    assert rest.tensors.keys() == whole[name].tensors.keys()
    for tensor_name, tensor in whole[name].tensors.items():
        assert torch.equal(rest.tensors[tensor_name], tensor), tensor_name


@pytest.mark.long
@pytest.mark.short
def test_runs_resumed_in_other_layouts_have_the_same_curves(
    whole: dict[str, Progress], pools: RankPools, tmp_path: Path
) -> None:
    first = pools[2].run(train, tmp_path, Layout(stages=2, chunks=2), HALF)[0]
    second = pools[2].run(train, tmp_path, Layout(replicas=2), WHOLE)
    for name, expected in whole.items():
        assert first[name].losses + second[0][name].losses == pytest.approx(expected.losses, rel=1e-9), name
        assert first[name].rates + second[0][name].rates == expected.rates, name
        # Replicas share the writing of what all of them hold.
        tensors = second[0][name].tensors | second[1][name].tensors
        assert tensors.keys() == expected.tensors.keys(), name
        for tensor_name, tensor in expected.tensors.items():
            if not tensor_name.startswith("lanes."):  # each replica has its own
                torch.testing.assert_close(tensors[tensor_name], tensor, rtol=1e-9, atol=1e-11, msg=tensor_name)


@pytest.mark.parametrize("name", [name for name in CONFIGS if "optimizer" not in CONFIGS[name]])
def test_each_part_of_the_optimizers_state_matters(
    name: str, half: dict[str, Progress], whole: dict[str, Progress], folder: Path
) -> None:
    """The tests above can fail: without any one part of the saved state, the curve is another."""
    _, checkpoint = restored(name, folder)
    names = [tensor.split(".") for tensor in checkpoint.manifest.tensors()]
    keys = {parts[-1] for parts in names if parts[0] == "optimizer"}
    assert keys
    for key in keys:
        trainer, _ = restored(name, folder)
        for state in trainer.optimizer.state.values():
            if key in state:
                state[key].zero_()
        try:
            is_same = advance(trainer, WHOLE).losses == whole[name].losses[HALF:]
        except DivergedError:  # it divides by zero
            is_same = False
        assert is_same == ((name, key) in UNUSED), key


@pytest.mark.parametrize(
    ("name", "part"),
    [*((name, "step") for name in ("linear", "inverse_sqrt", "one_cycle", "constant"))]
    + [("plateau", part) for part in ("step", "improvement", "num_reductions")],
)
def test_each_part_of_a_schedules_state_matters(
    name: str, part: str, half: dict[str, Progress], whole: dict[str, Progress], folder: Path
) -> None:
    trainer, _ = restored(name, folder)
    setattr(trainer, part, getattr(make_trainer(name, Layout(), single()), part))
    assert advance(trainer, trainer.step + WHOLE - HALF).rates != whole[name].rates[HALF:]


@pytest.mark.parametrize("part", ["tensors", "num_averaged"])
@pytest.mark.parametrize("name", ["ema", "swa"])
def test_each_part_of_an_averages_state_matters(
    name: str, part: str, half: dict[str, Progress], whole: dict[str, Progress], folder: Path
) -> None:
    trainer, _ = restored(name, folder)
    average = trainer._average
    if part == "tensors":
        for tensor in average.tensors.values():
            tensor.zero_()
    else:
        average.num_averaged = 0
    rest = advance(trainer, WHOLE)
    averages = [tensor_name for tensor_name in rest.tensors if tensor_name.startswith("average.")]
    assert averages
    for tensor_name in averages:
        assert not torch.equal(rest.tensors[tensor_name], whole[name].tensors[tensor_name])
