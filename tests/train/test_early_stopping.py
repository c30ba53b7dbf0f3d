"""A run stops when its evaluations no longer improve; it resumes and ends as if nothing had happened."""

import json
from pathlib import Path

import pytest
import torch

from helpers.rank_pool import RankPools
from helpers.short_params import some_short
from stretto import Layout, Run, StepReport, World, load_model
from stretto.checkpoint import find_checkpoint
from stretto.config.run import RunConfig
from stretto.config.toml import parse_config
from stretto.data import prepare_text
from stretto.errors import ConfigError
from stretto.train import EvaluationReport
from stretto.train.events import Event, PreemptedError
from stretto.train.trainer import Request


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text to train on, and validation text with other letters, on which the loss only rises."""
    folder = tmp_path_factory.mktemp("data")
    for name, text in (("train", "ab"), ("valid", "yz")):
        (folder / f"{name}.txt").write_text(text * 450)
        prepare_text([folder / f"{name}.txt"], folder / name)
    return folder


def config_for(data: Path, folder: Path, **train: object) -> RunConfig:
    return parse_config(
        {
            "data": {"train": str(data / "train"), "valid": str(data / "valid"), "lanes": 4, "window": 10},
            "model": {"hidden": 8, "layers": 1},
            "train": {"steps": 20, "lr": 0.05, "patience": 2, **train},
            "run": {"folder": folder, "device": "cpu", "eval_every": 2},
            "save": {"keep_best": True, "keep": 1},
        }
    )


def events_of(run: Run) -> list[Event]:
    return list(run.events())


def summary(folder: Path) -> list[tuple[int, float, float | None]]:
    """The steps of a run's log with loss and learning rate, and its evaluations."""
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    kept = [line for line in lines if line["kind"] in ("step", "evaluation")]
    return [(line["step"], line["loss"], line.get("learning_rate")) for line in kept]


def test_a_run_shows_its_state_last_losses_and_best_checkpoint_in_a_notebook(data: Path, tmp_path: Path) -> None:
    run = Run(config_for(data, tmp_path / "run"))
    assert "<td>state</td><td>not started</td>" in run._repr_html_() and "loss" not in run._repr_html_()
    events = run.events()
    for event in events:
        if isinstance(event, StepReport) and event.step == 4:
            break
    assert "<td>after step 4, 20% done</td>" in run._repr_html_()
    steps = {event.step: event.loss for event in events if isinstance(event, StepReport)}
    table = run._repr_html_()
    assert "<td>stopped early after step 6</td>" in table
    assert f"<td>training loss</td><td>{steps[6]:.4f} after step 6</td>" in table
    evaluations = {step: loss for step, loss, lr in summary(tmp_path / "run") if lr is None}
    assert f"<td>validation loss</td><td>{evaluations[6]:.4f} after step 6</td>" in table
    assert f"<td>best checkpoint</td><td>step 2, validation loss {evaluations[2]:.4f}</td>" in table


def test_a_run_stops_after_evaluations_without_improvement(data: Path, tmp_path: Path) -> None:
    run = Run(config_for(data, tmp_path / "run"))
    events = events_of(run)
    assert [event.step for event in events if isinstance(event, StepReport)] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events if isinstance(event, EvaluationReport)] == [2, 4, 6]
    assert run.trainer.has_stopped_early and run.trainer.is_done
    last, best = find_checkpoint(tmp_path / "run"), find_checkpoint(f"{tmp_path / 'run'}@best")
    assert last.manifest.training_state.step == 6 and last.manifest.training_state.is_done
    assert best.manifest.training_state.step == 2
    weights = load_model(tmp_path / "run").stack.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in run.engine.stack.state_dict().items())
    # Started again, it is done; with more patience, it continues.
    assert Run(config_for(data, tmp_path / "run")).is_finished
    longer = Run(config_for(data, tmp_path / "run", patience=3))
    assert not longer.is_finished
    assert [event.step for event in events_of(longer) if isinstance(event, StepReport)] == [7, 8]
    assert load_model(tmp_path / "run").stack.state_dict().keys() == weights.keys()


@pytest.mark.long
@pytest.mark.parametrize(
    ("request_step", "saved_step"), [(1, 2), (2, 2), (3, 4)], ids=["before an evaluation", "in it", "before the next"]
)
@pytest.mark.parametrize("schedule", some_short(["plateau", "cosine"]))
def test_a_run_that_is_preempted_stops_after_the_same_step(
    schedule: str, request_step: int, saved_step: int, data: Path, tmp_path: Path
) -> None:
    settings = {"schedule": schedule, **({"plateau_patience": 1} if schedule == "plateau" else {})}
    whole = Run(config_for(data, tmp_path / "whole", **settings))
    events_of(whole)
    run = Run(config_for(data, tmp_path / "run", **settings))
    with pytest.raises(PreemptedError):
        for event in run.events():
            if isinstance(event, StepReport) and event.step == request_step:
                run.trainer.request(Request.STOP)
    resumed = Run(config_for(data, tmp_path / "run", **settings))
    assert resumed.trainer.step == saved_step
    events_of(resumed)
    assert summary(tmp_path / "run") == summary(tmp_path / "whole")
    assert resumed.trainer.improvement == whole.trainer.improvement
    best, expected = (find_checkpoint(f"{tmp_path / name}@best") for name in ("run", "whole"))
    assert best.manifest.training_state.step == expected.manifest.training_state.step == 2
    assert resumed.is_finished or Run(config_for(data, tmp_path / "run", **settings)).is_finished


@pytest.mark.parametrize("steps", [20, 4], ids=["during the run", "after the last step"])
def test_a_run_that_is_preempted_in_an_evaluation_repeats_it(steps: int, data: Path, tmp_path: Path) -> None:
    whole = Run(config_for(data, tmp_path / "whole", steps=steps))
    events_of(whole)
    run = Run(config_for(data, tmp_path / "run", steps=steps))
    with pytest.raises(PreemptedError, match="stopped in the evaluation after step 4, as requested"):
        for event in run.events():
            # The evaluation begins when the event of its step has been consumed.
            if isinstance(event, StepReport) and event.step == 4:
                run.trainer.request(Request.STOP)
    resumed = Run(config_for(data, tmp_path / "run", steps=steps))
    assert resumed.trainer.step == 4
    events_of(resumed)
    assert (tmp_path / "run" / "weights.safetensors").exists()
    assert summary(tmp_path / "run") == summary(tmp_path / "whole")


def steps_on_rank(world: World, data: Path, folder: Path) -> tuple[int, bool]:
    config = config_for(data, folder)
    run = Run(config.model_copy(update={"layout": Layout(stages=2, chunks=2)}), world)
    events_of(run)
    return run.trainer.step, run.trainer.has_stopped_early


def test_all_ranks_stop_after_the_same_step(data: Path, tmp_path: Path, pools: RankPools) -> None:
    assert pools[2].run(steps_on_rank, data, tmp_path / "run") == [(6, True)] * 2
    assert Run(config_for(data, tmp_path / "run")).is_finished, "also in another layout"


def test_a_plateau_lowers_the_learning_rate(data: Path, tmp_path: Path) -> None:
    config = config_for(data, tmp_path / "run", patience=3, schedule="plateau", plateau_patience=1, plateau_factor=0.1)
    rates = [event.learning_rate for event in events_of(Run(config)) if isinstance(event, StepReport)]
    assert rates == pytest.approx([0.05] * 4 + [0.005] * 2 + [0.0005] * 2)


@pytest.mark.parametrize("train", [{"patience": 1}, {"patience": None, "schedule": "plateau"}])
def test_what_depends_on_evaluations_needs_them(train: dict[str, object], data: Path, tmp_path: Path) -> None:
    tree = config_for(data, tmp_path).model_dump(mode="json", exclude_none=True)
    tree["train"] = {key: value for key, value in {**tree["train"], **train}.items() if value is not None}
    for section, field in (("data", "valid"), ("run", "eval_every")):
        without = {**tree, section: {key: value for key, value in tree[section].items() if key != field}}
        with pytest.raises(ConfigError, match=r"depends on evaluations during the run; set data\.valid and"):
            parse_config(without)
