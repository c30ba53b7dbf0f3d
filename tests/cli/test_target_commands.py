"""Targets of every kind through `init`, `train`, `eval` and `predict`, with no edit in between."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto import load_config, load_model
from stretto.cli.main import main
from stretto.data import LabeledItems, Sequences, from_arrays
from stretto.errors import DataError
from stretto.serve import predict_arrays

DRAW = np.random.default_rng(1)
X = DRAW.normal(5, 2, size=(60, 7, 3))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def use(path: str, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[str, list[dict[str, Any]]]:
    """Call the commands; return what `init` says, and the predictions."""
    assert main(["init", path, "--name", "a", *options]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert main(["train", "run.toml", "--train.steps", "2"]) == 0, capsys.readouterr().err
    assert main(["eval", "runs/a"]) == 0
    assert main(["predict", "runs/a", "--data", path]) == 0, capsys.readouterr().err
    return said, [json.loads(line) for line in Path("runs/a/predictions.jsonl").read_text().splitlines()]


def test_arrays_in_a_file_are_trained_on_and_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    y = X[:, -1] @ DRAW.normal(size=(3, 5)) * 100 + 1000
    np.savez("a.npz", X=X, y=y)
    said, predictions = use("a.npz", capsys)
    assert "task    predict the values of 'targets' of a sequence" in said and "5 values to predict" in said
    assert load_config("run.toml").model.loss is None  # the squared error
    assert np.allclose([[*row["actual"].values()] for row in predictions], y, rtol=1e-6)
    # In their own units, as computed in Python from the raw arrays.
    trained = load_model("runs/a", "cpu")
    expected = predict_arrays(trained.raw_stack, X.astype(np.float32))
    assert np.allclose([[*row["values"].values()] for row in predictions], expected, rtol=1e-4)
    assert np.array_equal(predict_arrays(trained, X.astype(np.float32)), expected)
    # Items in memory are not scaled; those of a store are, when they are read.
    assert np.array_equal(predict_arrays(trained, from_arrays(X.astype(np.float32), y)), expected)
    items = LabeledItems(Sequences.open("data/a/train"))
    raw = [np.asarray(record["inputs"], np.float32) for record in replace(items, scale=False).records()]
    assert np.allclose(predict_arrays(trained, items), predict_arrays(trained, raw), rtol=1e-5)
    assert not trained.stack.training
    with pytest.raises(DataError, match="inputs have scale=False, but the run has True; use scale=True"):
        predict_arrays(trained, replace(items, scale=False))


def write_tags(path: Path) -> None:
    words = [DRAW.choice(["red", "blue", "fox", "dog"], size=4 + row % 3).tolist() for row in range(50)]
    tags = [["A" if word in ("red", "blue") else "N" for word in row] for row in words]
    lines = [{"text": " ".join(row), "tags": tag} for row, tag in zip(words, tags, strict=True)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_steps(path: Path) -> None:
    lines = [{"heat": row[:, 0].tolist(), "wind": row[:, 1].tolist(), "load": row.sum(1).tolist()} for row in X]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_prices(path: Path) -> None:
    rows = [f'"{row[:, 0].round(3).tolist()}",{row[0].sum():.3f}\n' for row in X]
    path.write_text("".join(["values,price\n", *rows]))


@pytest.mark.long
@pytest.mark.parametrize(
    ("write", "name", "options", "task", "field"),
    [
        (write_tags, "a.jsonl", [], "the class 'tags' of each time step, read word by word", "labels"),
        (
            write_steps,
            "a.jsonl",
            ["--inputs", "heat,wind", "--targets", "load", "--target-kind", "values_per_step"],
            "the values of 'load' of each time step",
            "values",
        ),
        (write_prices, "a.csv", ["--targets", "price"], "the values of 'price' of a sequence", "values"),
    ],
)
def test_records_with_targets_are_trained_on_and_predicted(
    write: Callable[[Path], None],
    name: str,
    options: list[str],
    task: str,
    field: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(Path(name))
    said, predictions = use(name, capsys, *options)
    assert f"task    predict {task}" in said and all(field in row for row in predictions)
    assert all("true_labels" in row or "actual" in row for row in predictions)


def test_what_contradicts_or_is_ambiguous_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    write_steps(Path("a.jsonl"))
    for options, message in (
        (["--inputs", "heat", "--targets", "load"], "--targets=load: lists such as"),
        (["--sequence", "heat", "--targets", "none"], "--targets=none is not a field of a.jsonl; choose from"),
        (["--label", "load", "--targets", "load"], "--label=load and --targets contradict each other"),
        (["--target-kind", "values_per_row"], "--target-kind=values_per_row needs --targets"),
        (
            ["--inputs", "heat", "--targets", "load", "--target-kind", "values_per_row", "--horizon", "3"],
            "--horizon is for",
        ),
    ):
        assert main(["init", "a.jsonl", *options]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.long
def test_columns_of_a_table_are_predicted_from_other_columns(capsys: pytest.CaptureFixture[str]) -> None:
    heat = np.abs(DRAW.normal(size=3000))
    lines = [
        f"{step},{value:.4f},{value * 2:.4f},{'on' if value > 0.6 else 'off'}\n" for step, value in enumerate(heat)
    ]
    Path("a.csv").write_text("".join(["time,heat,load,state\n", *lines]))
    said, predictions = use("a.csv", capsys, "--inputs", "heat", "--targets", "state")
    assert "task    predict the class 'state' of each time step" in said and "stretto forecast" not in said
    assert load_config("run.toml").data.context == 512  # one long series becomes several rows
    assert len(predictions) == 1 and len(predictions[0]["labels"]) == len(predictions[0]["true_labels"]) == 3000
    assert main(["init", "a.csv", "--targets", "state", "--horizon", "3", "--force"]) == 2
    assert "--horizon is for a forecast, but the run predicts 'state'; leave it out" in capsys.readouterr().err
