"""Averages of the weights: what they are, and where they are used."""

from pathlib import Path

import pytest
import torch

from stretto import Run, TrainConfig, Trainer, load_model, make_engine
from stretto.checkpoint import find_checkpoint
from stretto.config.run import RunConfig
from stretto.config.toml import parse_config
from stretto.data import Corpus, Lanes
from stretto.errors import ConfigError
from stretto.nn import LSTM, CrossEntropy, Embedding, Linear, Stack
from stretto.train import EvaluationReport


def trained_weights(byte_corpus: Corpus, **fields: object) -> tuple[Trainer, list[torch.Tensor]]:
    """Train for six steps; return the trainer, and one of its weights after each step."""
    model = Stack([Embedding(256, 8), LSTM(8, 8), Linear(8, 256)]).double()
    config = TrainConfig.model_validate({"steps": 6, "lr": 0.5, "optimizer": "sgd", **fields})
    trainer = Trainer(make_engine(model, CrossEntropy(), seed=1), Lanes(byte_corpus, 4, 20), config)
    weight = next(trainer.engine.stack.parameters())
    return trainer, [weight.detach().clone() for _ in trainer]


def test_swa_is_the_mean_of_the_weights_since_its_start(byte_corpus: Corpus) -> None:
    trainer, seen = trained_weights(byte_corpus, average="swa", average_start=3)
    weight = next(trainer.engine.stack.parameters())
    with trainer.averaged_weights():
        torch.testing.assert_close(weight.detach(), torch.stack(seen[2:]).mean(0))
    assert torch.equal(weight, seen[-1]), "training continues with the weights themselves"


def test_ema_decays_exponentially(byte_corpus: Corpus) -> None:
    trainer, seen = trained_weights(byte_corpus, average="ema", average_decay=0.7)
    expected = seen[0]
    for weight in seen[1:]:
        expected = 0.7 * expected + 0.3 * weight
    with trainer.averaged_weights():
        torch.testing.assert_close(next(trainer.engine.stack.parameters()).detach(), expected)


def test_without_averages_the_weights_are_used(byte_corpus: Corpus) -> None:
    for fields in ({}, {"average": "swa", "average_start": 6}):
        trainer, seen = trained_weights(byte_corpus, **fields)
        with trainer.averaged_weights():
            assert torch.equal(next(trainer.engine.stack.parameters()), seen[-1])


def run_config(corpus: Corpus, folder: Path, **train: object) -> RunConfig:
    return parse_config(
        {
            "data": {"train": corpus.location, "valid": corpus.location, "lanes": 8, "window": 20},
            "model": {"hidden": 12},
            "train": {"steps": 6, "average": "swa", "lr": 0.05, **train},
            "run": {"folder": folder, "device": "cpu", "eval_every": 3},
            "save": {"every": 3},
        }
    )


def test_evaluations_checkpoints_and_final_weights_are_those_of_the_averages(
    byte_corpus: Corpus, tmp_path: Path
) -> None:
    run = Run(run_config(byte_corpus, tmp_path))
    losses = [event.evaluation.loss for event in run.events() if isinstance(event, EvaluationReport)]
    middle = find_checkpoint(tmp_path / "checkpoints" / "step-000000003-g1")
    for path, loss in ((middle.location, losses[0]), (tmp_path, losses[1])):
        assert load_model(path).evaluate(byte_corpus.location).loss == pytest.approx(loss, rel=1e-6)
    plain = run.engine.stack.state_dict()
    with run.trainer.averaged_weights():
        for name, tensor in load_model(tmp_path).stack.state_dict().items():
            assert torch.equal(run.engine.stack.state_dict()[name], tensor)
    assert any(not torch.equal(plain[name], tensor) for name, tensor in load_model(tmp_path).stack.state_dict().items())


def test_an_average_may_begin_later_but_not_change(byte_corpus: Corpus, tmp_path: Path) -> None:
    list(Run(run_config(byte_corpus, tmp_path, average="none")).events())
    later = Run(run_config(byte_corpus, tmp_path, steps=9, average_start=8))
    list(later.events())
    assert find_checkpoint(tmp_path).manifest.training_state.num_averaged == 2
    with pytest.raises(ConfigError, match=r"train\.average=ema, but .* was saved with train\.average=swa; set it back"):
        Run(run_config(byte_corpus, tmp_path, steps=12, average="ema"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"average_start": 3}, "average_start=3 needs average='ema' or 'swa', not 'none'; remove average_start"),
        ({"average": "swa", "average_decay": 0.9}, "average_decay=0.9 needs average='ema', not 'swa'"),
        ({"average": "swa", "average_start": 7, "steps": 6}, "average_start=7 exceeds steps=6; start earlier"),
    ],
)
def test_fields_that_have_no_effect_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig.model_validate(fields)


def test_nt_asgd_averages_after_an_evaluation_that_is_worse_and_resumes_the_same(
    byte_corpus: Corpus, tmp_path: Path
) -> None:
    model = Stack([Embedding(256, 8), LSTM(8, 8), Linear(8, 256)]).double()
    config = TrainConfig(steps=8, lr=0.5, optimizer="sgd", average="nt-asgd", average_patience=1)
    trainer = Trainer(make_engine(model, CrossEntropy(), seed=1), Lanes(byte_corpus, 4, 20), config)
    weight = next(trainer.engine.stack.parameters())
    seen = []
    for report, loss in zip(trainer, [3.0, 2.0, 2.5, 3.5, 3.0, 3.0, 3.0, 3.0], strict=True):
        seen.append(weight.detach().clone())
        trainer.record_score(loss)
        assert trainer.snapshot().training_state.average_trigger.start == (None if report.step < 4 else 5)
    with trainer.averaged_weights():
        torch.testing.assert_close(weight.detach(), torch.stack(seen[4:]).mean(0))


def test_nt_asgd_needs_evaluations(byte_corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.average='nt-asgd' depends on evaluations during the run"):
        parse_config({"data": {"train": byte_corpus.location}, "train": {"average": "nt-asgd"}})
