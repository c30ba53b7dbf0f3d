"""data.factory: a run on data that a user's function returns, as rows or as windows."""

import os
from pathlib import Path

import numpy as np
import pytest

from helpers.rank_pool import RankPools
from stretto import Run, load_model
from stretto.cli.main import main
from stretto.config.run import RunConfig
from stretto.config.toml import parse_config
from stretto.data import from_arrays
from stretto.errors import ConfigError, DataError, StrettoError
from stretto.mesh.world import World
from stretto.serve import predict
from stretto.train import EvaluationReport

CODE = """
import os
import numpy as np
from stretto.data import Batches, from_arrays

draw = np.random.default_rng(1)
X = draw.normal(size=(90, 6, 3))
names = np.array(["down", "up"])[(X.sum(axis=(1, 2)) > 0).astype(int)]

def both():
    return from_arrays(X[:60], names[:60]), from_arrays(X[60:], names[60:], classes=["down", "up"])

def windows():
    return Batches(from_arrays(X, X.mean(axis=1)), max_rows=16)

def other():
    return from_arrays(X + 1, names), None

def only_validation():
    return None, from_arrays(X, names)

def by_rank():
    return from_arrays(X + int(os.environ["RANK"]), names)

def per_step():
    return from_arrays(X, names), from_arrays(X, X)

def fails():
    raise KeyError("gone")

def array():
    return X

def wrong():
    return from_arrays(X, names[:5])
"""


def config(folder: Path, name: str, **sections: dict[str, object]) -> RunConfig:
    if not (folder / "mine.py").exists():
        (folder / "mine.py").write_text(CODE)
    tree = {
        "data": {"factory": f"{folder}/mine.py:{name}", **sections.pop("data", {})},
        "model": {"hidden": 8, "layers": 1},
        "train": {"steps": 4, "lr": 0.01},
        "run": {"folder": str(folder / "run")},
        **sections,
    }
    return parse_config(tree)


def test_a_run_trains_and_evaluates_on_a_users_rows_and_is_loaded(tmp_path: Path) -> None:
    run = Run(config(tmp_path, "both", data={"budget": 96}))
    assert run.data_spec.labels == ("down", "up") and run.data_spec.task.targets == "class_per_row"
    *_, last = run.events()
    assert isinstance(last, EvaluationReport) and last.evaluation.num_targets == 30
    assert "accuracy" in last.evaluation.scores
    trained = load_model(tmp_path / "run")
    assert trained.data_spec == run.data_spec and trained.config.data.factory is not None


def test_a_run_resumes_on_the_same_data_only(tmp_path: Path) -> None:
    list(Run(config(tmp_path, "both", train={"steps": 2})).events())
    resumed = Run(config(tmp_path, "both", train={"steps": 3}))
    assert resumed.trainer.step == 2
    resumed.close()
    with pytest.raises(ConfigError, match=r"mine\.py:other is not the data that .* was saved with"):
        Run(config(tmp_path, "other", train={"steps": 3}))


def test_commands_say_how_to_use_a_run_on_rows_in_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_config = config(tmp_path, "both")
    list(Run(run_config).events())
    folder = str(run_config.run.folder)
    for command in ("predict", "eval"):
        assert main([command, folder]) != 0
        printed = _one_line(capsys)
        assert "which only `stretto eval --trust` calls; to predict, call stretto.serve.predict_" in printed
    np.savez(tmp_path / "new.npz", X=np.zeros((2, 6, 3)))
    trained = load_model(folder)
    with pytest.raises(DataError, match=r"new\.npz can't be read like the run's data, .*predict_arrays"):
        list(predict(trained, tmp_path / "new.npz"))
    rows = from_arrays(np.zeros((2, 6, 3)), ["up", "down"])
    with pytest.raises(DataError, match=r"location is of type ArrayItems, .*; call predict_arrays"):
        list(predict(trained, rows))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"location is of type ArrayItems, .*; call stretto.evaluate"):
        trained.evaluate(rows)  # type: ignore[arg-type]


def test_eval_calls_the_function_that_the_run_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_config = config(tmp_path, "both", train={"steps": 3})
    events = list(Run(run_config).events())
    losses = [event.evaluation.loss for event in events if isinstance(event, EvaluationReport)]
    folder = str(run_config.run.folder)
    capsys.readouterr()
    assert main(["eval", folder, "--trust"]) == 0
    printed = capsys.readouterr().out
    assert f"mine.py:both: loss {losses[-1]:.4f}" in printed and "30 labels" in printed, printed
    with pytest.raises(ConfigError, match=r"would run Python code .*set trust=True"):
        load_model(folder).evaluate_factory()
    (tmp_path / "mine.py").write_text(CODE.replace("names[60:], classes", "names[60:][::-1], classes"))
    trained = load_model(folder, trust=True)
    assert trained.evaluate_factory().loss != pytest.approx(losses[-1], rel=1e-6)
    (tmp_path / "mine.py").unlink()
    assert main(["eval", folder, "--trust"]) == 2
    assert "mine.py:both' can't be imported" in _one_line(capsys)


def _one_line(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


def test_windows_are_used_as_they_are(tmp_path: Path) -> None:
    run = Run(config(tmp_path, "windows"))
    assert str(run.trainer.windows) == "90 rows in batches of at most 16 rows"
    assert run.data_spec.task.targets == "values_per_row" and len(list(run.events())) > 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails", r"mine\.py:fails' failed \(KeyError: 'gone'\); fix the function, which is called without arguments"),
        ("array", r"mine\.py:array' returned an object of type ndarray; return rows, as stretto\.data\.from_arrays"),
        ("wrong", r"mine\.py:wrong': targets have 5 rows, but inputs have 90"),
        ("per_step", r"mine\.py:per_step' \(validation\) has values_per_step as targets, but .* has class_per_row"),
        ("only_validation", r"mine\.py:only_validation' returned None for training; return rows or windows"),
        ("nothing", r"mine\.py has no nothing"),
    ],
)
def test_a_mistake_is_one_sentence(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match=message):
        Run(config(tmp_path, name))


def test_a_factory_replaces_the_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data: train can't be combined with factory='.*'; leave out one"):
        config(tmp_path, "both", data={"train": "data"})
    with pytest.raises(ConfigError, match=r"data\.context=3 has no effect with data\.factory='.*'; leave it out"):
        Run(config(tmp_path, "both", data={"context": 3}))
    for field in ("budget", "lanes", "row_multiple"):
        with pytest.raises(ConfigError, match=rf"data\.{field}=96 has no effect, since .* returns windows"):
            Run(config(tmp_path, "windows", data={field: 96}))


def test_early_stopping_uses_the_validation_data_of_the_function(tmp_path: Path) -> None:
    settings: dict[str, dict[str, object]] = {
        "train": {"steps": 40, "lr": 5.0, "patience": 1},
        "run": {"folder": str(tmp_path / "run"), "eval_every": 2},
    }
    run = Run(config(tmp_path, "both", **settings))
    assert len(list(run.events())) > 0 and run.trainer.has_stopped_early
    with pytest.raises(ConfigError, match=r"patience=1 depends on .*other' returned no validation data; return"):
        Run(config(tmp_path, "other", **settings))
    with pytest.raises(ConfigError, match=r"patience=1 depends on evaluations during the run; set run\.eval_every"):
        config(tmp_path, "both", train={"patience": 1})


def run_on_rank(world: World, folder: Path, name: str) -> str:
    os.environ["RANK"] = str(world.rank)
    try:
        Run(config(folder, name, layout={"replicas": 2}), world).close()
    except StrettoError as error:
        return str(error)
    return ""


def test_ranks_with_different_data_are_refused_on_every_rank(tmp_path: Path, pools: RankPools) -> None:
    (tmp_path / "mine.py").write_text(CODE)  # before the ranks read it
    messages = pools[2].run(run_on_rank, tmp_path, "by_rank")
    assert messages[0] == messages[1]
    assert messages[0].endswith("by_rank differs on 1 of 2 ranks from that of rank 0; use the same data on every rank")
    assert pools[2].run(run_on_rank, tmp_path, "both") == ["", ""]
