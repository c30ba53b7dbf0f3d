"""A weight that changes silently on one rank is noticed, the rank is named, and the run ends as if nothing had been."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers.layout_cases import MODELS, Case, RandomWindows
from helpers.rank_pool import RankPools
from stretto import CheckpointManager, Layout, Run, StepReport, TrainConfig, Trainer, World, make_engine
from stretto.base.checksum import checksum
from stretto.checkpoint import find_checkpoint
from stretto.config.toml import parse_config
from stretto.data import Corpus
from stretto.errors import CorruptionError
from stretto.mesh.topology import Topology
from stretto.nn import CrossEntropy, Stack
from stretto.report import render_run
from stretto.train import Corruption, WeightCheck
from stretto.train.weight_check import find_wrong_ranks

EVERY, SAVE_EVERY, STEPS = 3, 4, 12


@dataclass(frozen=True)
class Flip:
    """A bit to flip on a rank, after a step, in a weight or in the optimizer's state."""

    rank: int
    step: int = 5
    bit: int = 20
    key: str | None = None  # of the optimizer's state


def flip_bit(trainer: Trainer, flip: Flip) -> str:
    """Flip the bit in the first weight matrix of the rank's last block; return the name that the run has for it."""
    name, weight = [item for item in trainer.engine.stack.named_weights().items() if item[1].dim() == 2][-1]
    tensor = weight.detach() if flip.key is None else trainer.optimizer.state[weight][flip.key]
    tensor.view(torch.int32)[1, 2] ^= 1 << flip.bit
    return f"weights.{name}" if flip.key is None else f"optimizer.{name}.{flip.key}"


def run_config(folder: Path, data: str, replicas: int, stages: int, every: int | None) -> object:
    return parse_config(
        {
            "data": {"train": data, "lanes": 12, "window": 12},
            "model": {"hidden": 12, "layers": 2},
            "train": {"steps": STEPS, "average": "ema", "lr": 0.01},
            "layout": {"replicas": replicas, "stages": stages},
            "run": {"folder": folder},
            "save": {"every": SAVE_EVERY, "minutes": 0},
            **({} if every is None else {"sentinel": {"hash_every": every}}),
        }
    )


def train_with_flip(
    world: World, folder: Path, data: str, replicas: int, flip: Flip | None
) -> tuple[Corruption | None, str]:
    """Train to the end, if need be after a restart; return what was found, and what was changed."""
    config = run_config(folder, data, replicas, world.size // replicas, None if flip is None else EVERY)
    name, corruption = "", None
    run = Run(config, world)  # type: ignore[arg-type]
    try:
        for event in run.events():
            if flip is not None and isinstance(event, StepReport) and event.step == flip.step:
                name = flip_bit(run.trainer, flip) if world.rank == flip.rank else name
    except CorruptionError as error:
        corruption = error.corruption
        for _ in Run(config, world).events():  # type: ignore[arg-type]
            pass
    return corruption, name


def weights_of(folder: Path) -> bytes:
    return (folder / "weights.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("replicas", "stages", "flips"),
    [
        # The lowest bit, and one that makes the loss infinite.
        (2, 1, [Flip(1, bit=0), Flip(0, bit=30)]),
        (3, 1, [Flip(2, bit=0)]),
        pytest.param(2, 1, [Flip(0), Flip(1, bit=31), Flip(1, key="exp_avg"), Flip(0, step=6)], marks=pytest.mark.long),
        pytest.param(3, 1, [Flip(1, bit=30), Flip(1, key="exp_avg_sq", bit=3)], marks=pytest.mark.long),
        pytest.param(2, 2, [Flip(1), Flip(2), Flip(3, key="exp_avg")], marks=pytest.mark.long),
        pytest.param(3, 2, [Flip(4)], marks=pytest.mark.long),
    ],
)
def test_a_flipped_bit_is_named_and_the_run_ends_with_the_same_weights(
    replicas: int, stages: int, flips: list[Flip], pools: RankPools, byte_corpus: Corpus, tmp_path: Path
) -> None:
    size, data = replicas * stages, str(byte_corpus.location)
    pools[size].run(train_with_flip, tmp_path / "undisturbed", data, replicas, None)
    for number, flip in enumerate(flips):
        folder = tmp_path / str(number)
        results = pools[size].run(train_with_flip, folder, data, replicas, flip)
        corruption, name = results[flip.rank]
        assert corruption is not None and all(result[0] == corruption for result in results)
        # Step 4 was checked before it was saved. The infinite loss of step 6 is noticed before it is a step.
        assert corruption.agreed_step == 4 and corruption.step in (5, 6) and corruption.is_certain, flip
        (suspect,) = corruption.suspects
        # The optimizer's state has changed the weight by then, which is named first.
        assert suspect.rank == flip.rank and suspect.tensor.removeprefix("weights.") in name, flip
        assert weights_of(folder) == weights_of(tmp_path / "undisturbed")
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, STEPS + 1))
        (line,) = (line for line in lines if line["kind"] == "corruption")
        assert line["suspects"][0]["rank"] == flip.rank and line["suspects"][0]["node"]
        # After the restart from step 4: every third step, and step 8, before it is saved.
        checks = [line for line in lines if line.pop("kind") == "weights"]
        expected = [{"step": 9, "num_checks": 3}, {"step": 12, "num_checks": 1}]
        assert checks == [{**fields, "num_copies": replicas} for fields in expected]
    assert suspect.tensor in render_run(folder)


def train_and_check(world: World, case: Case, layout: Layout) -> list[float]:
    """Train in a loop of one's own, and compare after each step."""
    model = Stack(MODELS[case.model]()).to(case.dtype)
    engine = make_engine(model, CrossEntropy(), layout, world, seed=3)
    trainer = Trainer(engine, RandomWindows(case), TrainConfig(steps=4, average="swa"), seed=case.seed)
    check, losses = WeightCheck(trainer), []
    for report in trainer:
        check.add_step()
        check.check()
        losses.append(report.loss)
    return losses


@pytest.mark.parametrize(
    ("model", "layout"),
    [("tied", Layout(replicas=2, stages=2, chunks=2)), ("noncausal", Layout(replicas=2, spans=2)), ("lstm", Layout())],
    ids=str,
)
def test_copies_that_agree_are_left_alone(model: str, layout: Layout, pools: RankPools) -> None:
    losses = pools[layout.num_ranks].run(train_and_check, Case(model, num_rows=8, is_ragged=False), layout)
    assert all(result == losses[0] for result in losses) and len(losses[0]) == 4


def test_a_trainer_goes_back_to_a_copy_of_its_state(tmp_path: Path) -> None:
    case = Case(dtype=torch.float32)
    world = World(0, 1, torch.device("cpu"))

    def make_trainer() -> Trainer:
        engine = make_engine(Stack(MODELS["lstm"]()), CrossEntropy(), Layout(), world, seed=3)
        return Trainer(engine, RandomWindows(case), TrainConfig(steps=9, average="ema", average_start=3))

    trainer = make_trainer()
    copies = [trainer.copy_state()]  # of step 0, before the optimizer has a state
    losses = []
    for report in trainer:
        losses.append(report.loss)
        copies.append(trainer.copy_state())
    with CheckpointManager(tmp_path / "first", world) as checkpoints:
        checkpoints.start()
        checkpoints.save(trainer.snapshot(), wait=True)
    for step in (7, 2, 0, 4):
        trainer.set_state(copies[step])
        assert [report.loss for report in trainer] == losses[step:]
    with CheckpointManager(tmp_path / "second", world) as checkpoints:
        checkpoints.start()
        checkpoints.save(trainer.snapshot(), wait=True)
    first, second = (find_checkpoint(tmp_path / name).manifest for name in ("first", "second"))
    assert first.files == second.files and first.training_state == second.training_state


def flipped(tensor: Tensor, byte: int, bit: int) -> Tensor:
    copy = tensor.clone(memory_format=torch.contiguous_format)
    copy.reshape(-1).view(torch.uint8)[byte] ^= 1 << bit
    return copy


@given(
    st.lists(st.integers(1, 5), max_size=3),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]),
    st.integers(0, 10**6),
    st.integers(0, 7),
    st.integers(0, 3),
)
def test_every_flipped_bit_changes_the_checksum(
    shape: list[int], dtype: torch.dtype, byte: int, bit: int, offset: int
) -> None:
    size = torch.Size(shape).numel()
    values = torch.randn(size + offset, generator=torch.Generator().manual_seed(byte)) * 50
    tensor = values.to(dtype)[offset:].view(shape)  # as a weight that is a part of a larger buffer
    assert checksum(tensor) == checksum(tensor.clone()) == checksum(tensor.clone().contiguous())
    changed = flipped(tensor if tensor.dim() else tensor.view(1), byte % tensor.nbytes, bit)
    assert checksum(changed) != checksum(tensor)


@pytest.mark.parametrize(
    ("topology", "doubted", "first_deviations", "expected"),
    [
        (Topology(2, 1), [0, 1], [3, 2], ([1], True)),
        (Topology(2, 1), [0, 1], [2, 2], ([0, 1], False)),  # a device that does not repeat its own bits
        # Stage 0 has no lanes and no loss, but its error shows in those of stage 1.
        (Topology(2, 2), [0, 2], [9, 4, 9, 3], ([2], True)),
        (Topology(2, 2), [1, 3], [2, 9, 3, 9], ([1], True)),
        (Topology(1, 1, num_spans=2), [0, 1], [3, 3], ([0, 1], False)),
        (Topology(1, 1, num_spans=2), [0, 1], [4, 3], ([1], True)),
    ],
)
def test_the_rank_that_deviates_first_is_named(
    topology: Topology, doubted: list[int], first_deviations: list[float], expected: tuple[list[int], bool]
) -> None:
    assert find_wrong_ranks(topology, doubted, first_deviations) == expected
