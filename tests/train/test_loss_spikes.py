"""A spike of the loss: the steps that led to it are undone and their windows skipped, in every layout alike."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.layout_cases import NUM_TOKENS, WIDTH, Case, RandomWindows
from helpers.rank_pool import RankPools
from stretto import CheckpointManager, Layout, Run, StepReport, TrainConfig, Trainer, World, make_engine
from stretto.base.loss_spikes import LossSpikes
from stretto.checkpoint import find_checkpoint
from stretto.config.toml import parse_config
from stretto.data import Corpus, Position, Window
from stretto.errors import ConfigError, DivergedError
from stretto.nn import GRU, CrossEntropy, Embedding, Linear, LockedDropout, Stack
from stretto.report import render_run

# Copies are made of the weights after steps 0, 4, 8 (in the step after it), ...: every four steps.
LOSSES, EVERY, STEPS = 5, 4, 20
BAD = (10, 11, 15)  # the windows with a spike; their steps are one more
CASE = Case(num_rows=8, num_steps=STEPS, is_ragged=False)
# Step 11 goes back to step 8. The next window is skipped alone. Step 16 has its spike before the next copy is due, so
# it goes back to what was restored in step 12.
REWINDS = [(11, 8), (12, 11), (16, 12)]


@dataclass(frozen=True)
class SpikedWindows(RandomWindows):
    """Windows of one token that is repeated, which are easy to learn; in some, it is followed by another."""

    bad: tuple[int, ...] = BAD

    def read(self, position: Position, *, inputs: bool = True, targets: bool = True) -> Window:
        window = super().read(position, inputs=inputs, targets=targets)
        follower = 7 if position.index in self.bad else 3
        return replace(
            window,
            inputs=None if window.inputs is None else torch.full_like(window.inputs, 3),
            targets=None if window.targets is None else torch.full_like(window.targets, follower),
        )


def make_trainer(world: World, layout: Layout, spike: float | None = 2.0, bad: tuple[int, ...] = BAD) -> Trainer:
    blocks = [Embedding(NUM_TOKENS, WIDTH), LockedDropout(0.1), GRU(WIDTH, WIDTH), Linear(WIDTH, NUM_TOKENS)]
    engine = make_engine(Stack(blocks).double(), CrossEntropy(), layout, world, seed=3)
    data = SpikedWindows(CASE, bad=bad)
    config = TrainConfig(steps=STEPS, lr=0.02, average="swa")
    if spike is not None:
        config = config.model_copy(update={"spike": spike, "spike_losses": LOSSES, "spike_rewind": EVERY})
    return Trainer(engine, data, config, seed=CASE.seed)


def rewinds_of(trainer: Trainer) -> list[tuple[int, int]]:
    return [(rewind.step, rewind.to) for rewind in trainer.spikes.rewinds]


def train(world: World, layout: Layout, folder: Path | None = None) -> tuple[list[float], list[tuple[int, int]]]:
    """Train; with a folder, save there after the last step."""
    trainer = make_trainer(world, layout)
    losses = [report.loss for report in trainer]
    if folder is not None:
        with CheckpointManager(folder, world) as checkpoints:
            checkpoints.start()
            checkpoints.save(trainer.snapshot(), wait=True)
    return losses, rewinds_of(trainer)


def resume(world: World, layout: Layout, step: int, folder: Path) -> tuple[list[float], list[tuple[int, int]]]:
    """Train up to a step and save it; or, if it is saved already, resume after it."""
    trainer = make_trainer(world, layout)
    losses = []
    with CheckpointManager(folder, world) as checkpoints:
        checkpoint = checkpoints.start()
        if checkpoint is not None:
            trainer.restore(checkpoint)
        while not trainer.is_done and not (checkpoint is None and trainer.step == step):
            losses.append(trainer.advance().loss)
        checkpoints.save(trainer.snapshot(), wait=True)
    return losses, rewinds_of(trainer)


def test_the_steps_since_the_copy_are_undone_and_nothing_else(tmp_path: Path) -> None:
    world = World(0, 1, torch.device("cpu"))
    trainer, plain = make_trainer(world, Layout()), make_trainer(world, Layout(), spike=None)
    reports = list(trainer)
    assert [(report.step, report.rewound_to) for report in reports if report.rewound_to is not None] == REWINDS
    # The same by hand, with a trainer that does not look for spikes.
    copies, losses = {}, []
    for _ in range(STEPS):
        copies[plain.step] = plain.copy_state()
        losses.append(plain.advance().loss)
        for step, to in REWINDS:
            if plain.step == step:
                copies[to].weights.restore(plain.engine.stack, plain.optimizer, plain._average)
    assert losses == [report.loss for report in reports]
    for one, other in zip(trainer.engine.stack.parameters(), plain.engine.stack.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(replicas=2),
        Layout(stages=2, chunks=2),
        pytest.param(Layout(replicas=2, stages=2, micro_batches=2), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_spike_is_undone_in_every_layout_alike(layout: Layout, pools: RankPools, tmp_path: Path) -> None:
    ((expected, rewinds),) = pools[1].run(train, Layout(), tmp_path / "one")
    assert rewinds == REWINDS
    for losses, own_rewinds in pools[layout.num_ranks].run(train, layout, tmp_path / "more"):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert own_rewinds == REWINDS
    one, more = (find_checkpoint(tmp_path / name).manifest.training_state for name in ("one", "more"))
    assert [(rewind.step, rewind.to) for rewind in more.spikes.rewinds] == REWINDS and one.spikes.num_rewinds == 3


@pytest.mark.parametrize("step", [10, 11, 14])
def test_a_spike_after_a_resume_in_another_layout_is_undone_as_if_the_run_had_not_stopped(
    step: int, pools: RankPools, tmp_path: Path
) -> None:
    (whole,) = pools[1].run(train, Layout())
    ((before, _), _) = pools[2].run(resume, Layout(replicas=2), step, tmp_path)
    ((after, rewinds), _) = pools[2].run(resume, Layout(stages=2, chunks=2), step, tmp_path)
    assert before + after == pytest.approx(whole[0], rel=1e-9) and rewinds == whole[1]


def test_a_run_logs_and_reports_what_it_has_undone(byte_corpus: Corpus, tmp_path: Path) -> None:
    # The learning rate is so high that losses rise, and the threshold so low that noise is a spike.
    spike = {"spike": 1.001, "spike_losses": 3, "spike_rewind": 2}

    def config(name: str, steps: int) -> object:
        return parse_config(
            {
                "data": {"train": byte_corpus.location, "lanes": 8, "window": 20},
                "model": {"hidden": 12},
                "train": {"steps": steps, "lr": 0.1, "schedule": "constant", **spike},
                "run": {"folder": tmp_path / name},
            }
        )

    reports = [event for event in Run(config("whole", 30)).events() if isinstance(event, StepReport)]  # type: ignore[arg-type]
    rewinds = {report.step: report.rewound_to for report in reports if report.rewound_to is not None}
    assert len(rewinds) > 3
    for steps in (11, 17, 30):
        list(Run(config("resumed", steps)).events())  # type: ignore[arg-type]
    for name in ("whole", "resumed"):
        lines = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        logged = {line["step"]: line["rewound_to"] for line in lines if line["kind"] == "step"}
        assert {step: to for step, to in logged.items() if to is not None} == rewinds
    whole, resumed = (load_file(tmp_path / name / "weights.safetensors") for name in ("whole", "resumed"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert "Steps undone because of a spike of the loss: " in render_run(tmp_path / "whole")


def test_a_run_whose_every_loss_is_a_spike_ends() -> None:
    trainer = make_trainer(World(0, 1, torch.device("cpu")), Layout(), bad=tuple(range(8, 1000)))
    trainer.config = trainer.config.model_copy(update={"steps": 1000})
    with pytest.raises(DivergedError, match=r"step 108 has loss .*above train\.spike=2\.0 .*the 99 steps before it"):
        list(trainer)


def test_a_copy_is_not_a_part_of_a_trainer_that_does_not_look_for_spikes(tmp_path: Path) -> None:
    world = World(0, 1, torch.device("cpu"))
    spiked, plain = make_trainer(world, Layout()), make_trainer(world, Layout(), spike=None)
    for _ in range(13):
        spiked.advance()
    with CheckpointManager(tmp_path, world) as checkpoints:
        checkpoints.start()
        checkpoints.save(spiked.snapshot(), wait=True)
        checkpoint = find_checkpoint(tmp_path)
        plain.restore(checkpoint)
    assert any(name.startswith("copy_weights.") for name in checkpoint.manifest.tensors())
    assert not any(shard.name.startswith("copy_") for shard in plain.snapshot().shards)
    assert rewinds_of(plain) == REWINDS[:2]
    assert plain.advance().rewound_to is None


def test_settings_of_spikes_need_the_threshold() -> None:
    with pytest.raises(ConfigError, match="spike_rewind=3 has no effect without spike; set spike"):
        parse_config({"data": {"train": "x"}, "train": {"spike_rewind": 3}})


def test_losses_below_zero_are_never_a_spike() -> None:
    spikes = LossSpikes(losses=(-1.0, -2.0, -3.0), copy_step=0)
    assert not spikes.is_spike(50.0, 2.0, 3)
    assert LossSpikes(losses=(1.0, 2.0, 3.0), copy_step=0).is_spike(4.1, 2.0, 3)
    assert not LossSpikes(losses=(1.0, 2.0), copy_step=0).is_spike(4.1, 2.0, 3)
