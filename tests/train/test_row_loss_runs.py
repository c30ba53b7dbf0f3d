"""Runs with losses over whole rows: weights of the loss are saved, resumed in another layout, and loaded."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.rank_pool import RankPools
from helpers.row_loss_cases import RaggedRows, RowCase, make_model
from stretto import CheckpointManager, Layout, Run, RunConfig, TrainConfig, Trainer, World, load_model, make_engine
from stretto.base.task import TargetKind, Task
from stretto.data import SequenceOptions, prepare_sequences
from stretto.errors import ConfigError
from stretto.nn import CRF, CTCLoss, RowLoss
from stretto.testing import verify
from stretto.train.row_loss_check import check_row_loss
from stretto.train.trainer import StepReport

CASE = RowCase()
CONFIG = TrainConfig(steps=4, lr=0.05, average="ema", average_decay=0.5)


def train(world: World, layout: Layout, folder: Path, steps: int) -> dict[str, torch.Tensor]:
    """Train up to a step, from the newest checkpoint; save; return this rank's weights."""
    trainer = Trainer(make_engine(*make_model(CASE), layout, world, seed=3), RaggedRows(CASE), CONFIG, seed=1)
    with CheckpointManager(folder, world) as checkpoints:
        checkpoint = checkpoints.start("auto")
        if checkpoint is not None:
            trainer.restore(checkpoint)
        while trainer.step < steps:
            trainer.advance()
        checkpoints.save(trainer.snapshot(), wait=True)
    return {name: weight.detach().clone() for name, weight in trainer.engine.stack.named_parameters()}


def test_a_run_resumes_in_another_layout_with_the_weights_of_its_loss(pools: RankPools, tmp_path: Path) -> None:
    alone = World(rank=0, size=1, device=torch.device("cpu"))
    expected = train(alone, Layout(), tmp_path / "whole", 4)
    after_one = train(alone, Layout(), tmp_path / "one", 1)
    assert not torch.equal(expected["loss.transitions"], after_one["loss.transitions"]), "the loss is trained"
    pools[2].run(train, Layout(stages=2, chunks=3), tmp_path / "a", 2)
    actual = pools[2].run(train, Layout(replicas=2), tmp_path / "a", 3)[1]
    assert "loss.transitions" in actual
    actual = train(alone, Layout(chunks=2), tmp_path / "a", 4)
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name], weight, rtol=1e-9, atol=1e-12, msg=name)


def verify_on_rank(world: World, case: RowCase, layout: Layout) -> tuple[bool, str, float]:
    result = verify(*make_model(case), RaggedRows(case), layout, world, num_steps=2)
    return result.is_equal, result.verdict, result.loss


def verify_with_an_unreduced_loss(world: World, layout: Layout) -> tuple[bool, str]:
    """As if the weights of the loss were left out of the reduction over replicas."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stretto.engine.replica.DistributedDataParallel", _without_loss)
        result = verify(*make_model(CASE), RaggedRows(CASE), layout, world, num_steps=1)
    return result.is_equal, result.verdict


def _without_loss(stack: Any, **options: Any) -> torch.nn.parallel.DistributedDataParallel:  # noqa: ANN401
    ignore = [name for name, _ in stack.named_parameters() if name.startswith("loss.")]
    ignore_parameters: Any = torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore_parameters(stack, ignore)
    return torch.nn.parallel.DistributedDataParallel(stack, **options)


@pytest.mark.parametrize(
    "case",
    [RowCase("ctc"), RowCase("crf"), RowCase("ctc", window=27, strides=(2, 2, 2))],
    ids=["ctc", "crf", "strided"],
)
def test_verify_knows_losses_over_whole_rows(case: RowCase, pools: RankPools) -> None:
    is_equal, verdict, difference = pools[2].run(verify_on_rank, case, Layout(stages=2, chunks=3))[0]
    assert is_equal, verdict
    assert 0 <= difference < 1e-9


def test_verify_finds_a_loss_whose_weights_are_not_reduced(pools: RankPools) -> None:
    is_equal, verdict = pools[2].run(verify_with_an_unreduced_loss, Layout(replicas=2))[0]
    assert not is_equal and "in the loss" in verdict


def write_store(folder: Path, loss: str, num_steps: int = 3) -> None:
    """Rows of channels whose symbols are their largest channel; each symbol lasts `num_steps` time steps."""
    draw = np.random.default_rng(1)
    records = []
    for _ in range(60):
        symbols = draw.integers(1, 4, draw.integers(1, 5))
        tags = np.repeat(symbols, num_steps)
        inputs = np.eye(4)[tags] + 0.1 * draw.normal(size=(len(tags), 4))
        targets: object = "".join("abcd"[symbol] for symbol in symbols) if loss == "ctc" else tags.tolist()
        records.append({"values": inputs.tolist(), "y": targets})
    (folder / "rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    kind: TargetKind = "sequence_per_row" if loss == "ctc" else "class_per_step"
    options = SequenceOptions(targets=("y",), target_kind=kind, validation_fraction=0.3)
    prepare_sequences(folder / "rows.jsonl", folder / "data", options)


def run_config(folder: Path, loss: str | None, **model: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"folder": folder / "run", "device": "cpu", "eval_every": 30},
            "data": {"train": str(folder / "data/train"), "valid": str(folder / "data/valid"), "budget": 200},
            "model": {"layers": 1, "hidden": 16, **({} if loss is None else {"loss": loss}), **model},
            "train": {"steps": 60, "lr": 0.02},
        }
    )


@pytest.mark.parametrize("loss", ["ctc", "crf"])
def test_a_run_learns_and_its_model_is_loaded_with_the_weights_of_its_loss(loss: str, tmp_path: Path) -> None:
    write_store(tmp_path, loss)
    run = Run(run_config(tmp_path, None if loss == "ctc" else loss, bidirectional=loss == "crf"))
    assert isinstance(run.engine.row_loss, CTCLoss if loss == "ctc" else CRF)
    losses = [event.loss for event in run.events() if isinstance(event, StepReport)]
    assert losses[-1] < 0.5 * losses[0]
    trained = load_model(tmp_path / "run")
    evaluation = trained.evaluate(tmp_path / "data/valid")
    assert evaluation.loss < losses[0]
    if loss == "crf":
        assert evaluation.accuracy is not None and evaluation.accuracy > 0.8
        assert isinstance(trained.stack.loss, RowLoss)
        last_weights = run.engine.stack.state_dict()
        assert torch.equal(trained.stack.state_dict()["loss.transitions"], last_weights["loss.transitions"])
    weights = tmp_path / "run" / "weights.safetensors"
    again = run_config(tmp_path, loss, bidirectional=loss == "crf", weights=str(weights))
    again = again.model_copy(update={"run": again.run.model_copy(update={"folder": tmp_path / "second"})})
    second = Run(again)
    for name, weight in second.engine.stack.named_parameters():
        assert torch.equal(weight, trained.stack.get_parameter(name))
    second.close()


@pytest.mark.parametrize(
    ("targets", "loss", "message"),
    [
        ("crf", "ctc", "'ctc' does not fit the data, whose targets are classes per time step; use cross_entropy, adap"),
        ("ctc", "crf", "'crf' does not fit the data, whose targets are a sequence of classes per row; use ctc"),
        ("ctc", "cross_entropy", "'cross_entropy' does not fit the data, whose targets are a sequence of classes per"),
    ],
)
def test_a_loss_that_does_not_fit_the_targets_is_refused(targets: str, loss: str, message: str, tmp_path: Path) -> None:
    write_store(tmp_path, targets)
    with pytest.raises(ConfigError, match=message):
        Run(run_config(tmp_path, loss))


def test_metrics_of_time_steps_are_refused_for_target_sequences(tmp_path: Path) -> None:
    write_store(tmp_path, "ctc")
    config = run_config(tmp_path, "ctc")
    config = config.model_copy(update={"metrics": config.metrics.model_copy(update={"names": ("accuracy",)})})
    with pytest.raises(ConfigError, match="compares outputs and targets of the same time step"):
        Run(config)


def test_a_run_with_stacked_frames_learns(tmp_path: Path) -> None:
    write_store(tmp_path, "ctc", num_steps=5)
    run = Run(run_config(tmp_path, "ctc", stack_frames=2))
    assert run.engine.stride == 2 and type(run.engine.stack[0]).__name__ == "StackFrames"
    losses = [event.loss for event in run.events() if isinstance(event, StepReport)]
    assert losses[-1] < 0.5 * losses[0]
    assert load_model(tmp_path / "run").evaluate(tmp_path / "data/valid").loss < losses[0]


@pytest.mark.parametrize("targets", ["next_token", "horizon"])
def test_the_message_for_targets_that_follow_from_the_inputs_names_no_others(targets: TargetKind) -> None:
    with pytest.raises(ConfigError, match=rf"targets \({targets}\) at every time step; leave out the strided blocks$"):
        check_row_loss(None, Task("channels", 2, targets, 2), is_stateful=True, stride=2)


def test_targets_of_time_steps_are_refused_for_strided_models(tmp_path: Path) -> None:
    write_store(tmp_path, "crf")
    with pytest.raises(ConfigError, match=r"of each 3 time steps \(stride=3\), but the data has targets \(class_per"):
        Run(run_config(tmp_path, "crf", stack_frames=3))
    case = RowCase("per step", strides=(1, 2, 1))
    with pytest.raises(ConfigError, match="at every time step; leave out the strided blocks, or use targets of whole"):
        Trainer(make_engine(*make_model(case), seed=1), RaggedRows(case), TrainConfig(steps=1))
