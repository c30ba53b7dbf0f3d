"""Targets in stores: a run on prepared records computes what it computes on the same arrays in memory."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from stretto import Run, StepReport, load_model
from stretto.config.run import MetricsConfig
from stretto.config.toml import parse_config
from stretto.data import Batches, LabeledItems, Position, SequenceOptions, TargetKind, from_arrays, prepare_sequences
from stretto.errors import ConfigError, DataError
from stretto.exchange import export_onnx
from stretto.nn import Rows
from stretto.serve import predict
from stretto.serve.metrics import compute_metrics
from stretto.serve.prediction import write_predictions

ROWS, STEPS, CHANNELS = 24, 5, 2
X = np.random.default_rng(1).normal(3, 2, (ROWS, STEPS, CHANNELS)).astype(np.float32)
LENGTHS = np.random.default_rng(2).integers(1, STEPS + 1, ROWS)
TARGETS: dict[TargetKind, Any] = {
    "class_per_row": np.where(X[:, 0, 0] > 3, "up", "down"),
    "values_per_row": np.stack([X[:, 0].sum(1), X[:, 0, 0] * 100, np.ones(ROWS)], axis=1).astype(np.float32),
    "class_per_step": np.where(X.sum(2) > 6, "up", "down").astype(object),
    "values_per_step": (X.cumsum(axis=1) * 10).astype(np.float32),
}
TARGETS["class_per_step"][::3, 0] = None  # some targets are missing
TARGETS["values_per_step"][::4, 0, 1] = np.nan

KINDS = pytest.mark.parametrize("kind", TARGETS)


def write_records(path: Path, kind: TargetKind) -> Path:
    lines = []
    for row, length in enumerate(LENGTHS):
        targets = TARGETS[kind][row] if kind.endswith("row") else TARGETS[kind][row, :length]
        value = targets.tolist()
        record = {"values": X[row, :length].tolist(), "y": value}
        lines.append(json.dumps(record).replace("NaN", "null") + "\n")
    path.write_text("".join(lines))
    return path


def store_of(folder: Path, kind: TargetKind, validation_fraction: float = 0.0) -> Path:
    path = write_records(folder / "records.jsonl", kind)
    options = SequenceOptions(targets=("y",), target_kind=kind, validation_fraction=validation_fraction)
    prepare_sequences(path, folder / "data", options)
    return folder / "data"


def run_of(folder: Path, data: dict[str, object], name: str = "run", **model: object) -> Run:
    tree = {
        "data": {"budget": 40, **data},
        "model": {"hidden": 8, "layers": 1, **model},
        "train": {"steps": 4, "lr": 0.01},
        "run": {"folder": str(folder / name), "device": "cpu"},
    }
    return Run(parse_config(tree))


def losses(run: Run) -> list[float]:
    return [event.loss for event in run.events() if isinstance(event, StepReport)]


@KINDS
def test_a_run_on_a_store_has_the_losses_of_the_same_arrays_in_memory(kind: TargetKind, tmp_path: Path) -> None:
    code = f"""
import numpy as np, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_stored_targets import LENGTHS, TARGETS, X
from stretto.data import from_arrays
def rows():
    return from_arrays(X, TARGETS[{kind!r}], lengths=LENGTHS, target_kind={kind!r})
"""
    (tmp_path / "mine.py").write_text(code)
    stored = losses(run_of(tmp_path, {"train": str(store_of(tmp_path, kind)), "scale": "none"}))
    in_memory = losses(run_of(tmp_path, {"factory": f"{tmp_path}/mine.py:rows"}, "arrays"))
    assert stored == in_memory and len(stored) == 4


@KINDS
def test_a_store_gives_the_rows_of_the_same_arrays(kind: TargetKind, tmp_path: Path) -> None:
    (sequences,) = prepare_sequences(
        write_records(tmp_path / "a.jsonl", kind), tmp_path / "out", SequenceOptions(targets=("y",), target_kind=kind)
    )
    stored, items = (
        LabeledItems(sequences, scale=False),
        from_arrays(X, TARGETS[kind], lengths=LENGTHS, target_kind=kind),
    )
    assert stored.task == items.task and stored.labels == items.labels
    rows = [(0, row) for row in range(ROWS)]
    payloads = [source.read(rows, STEPS, inputs=True, targets=True) for source in (stored, items)]
    for one, two in zip(*payloads, strict=True):
        assert one is not None and two is not None and torch.equal(one.nan_to_num(-1), two.nan_to_num(-1))


@KINDS
def test_predictions_are_the_outputs_of_the_model_in_the_units_of_the_targets(kind: TargetKind, tmp_path: Path) -> None:
    run = run_of(tmp_path, {"train": str(store_of(tmp_path, kind))})
    list(run.events())
    trained = load_model(tmp_path / "run", "cpu")
    from_store = list(predict(trained, tmp_path / "data"))
    assert from_store == list(predict(trained, tmp_path / "records.jsonl")) and len(from_store) == ROWS
    for row, result in enumerate(from_store):
        length = int(LENGTHS[row])
        x = torch.from_numpy(X[row, :length])[:, None]
        stack = trained.raw_stack.eval()
        with torch.no_grad():
            y, _ = stack(x, stack.begin(Rows.of(1, length)))
        y = y[:, 0] if kind.endswith("step") else y[-1, 0]
        true = TARGETS[kind][row] if kind.endswith("row") else TARGETS[kind][row, :length]
        if kind.startswith("class"):
            named = np.array(trained.data_spec.labels)[y.argmax(-1).numpy()].tolist()
            assert result["labels" if kind.endswith("step") else "label"] == named
            assert result["true_labels" if kind.endswith("step") else "true_label"] == true.tolist()
        else:
            predicted = np.array([*result["values"].values()], np.float32).T
            assert np.allclose(predicted, y.numpy(), rtol=1e-4, atol=1e-4)
            actual = np.array([*result["actual"].values()], np.float32).T
            assert np.allclose(actual, true, rtol=1e-5, equal_nan=True)
    write_predictions(trained, tmp_path / "data", tmp_path / "out.jsonl")
    metrics = compute_metrics(tmp_path / "out.jsonl")
    if kind.startswith("values"):
        name = "y.0"
        errors = [np.abs(np.subtract(row["values"][name], row["actual"][name])) for row in from_store]
        assert metrics[f"mean absolute error of {name}"] == pytest.approx(
            np.concatenate(list(map(np.atleast_1d, errors))).mean()
        )
        assert set(metrics) == {f"mean absolute error of {name}" for name in from_store[0]["values"]}
        location = str(tmp_path / "data")
        config = trained.config.model_copy(update={"metrics": MetricsConfig(names=("mae",))})
        total = sum(np.nansum(np.abs(_difference(row, name))) for row in from_store for name in row["values"])
        count = sum(np.sum(~np.isnan(_difference(row, name))) for row in from_store for name in row["values"])
        assert replace(trained, config=config).evaluate(location).scores["mae"] == pytest.approx(total / count, 1e-4)
    else:
        assert set(metrics) == {"accuracy"}


def _difference(row: dict[str, Any], name: str) -> NDArray[np.float64]:
    return np.atleast_1d(np.subtract(np.array(row["values"][name], float), np.array(row["actual"][name], float)))


@pytest.mark.parametrize("kind", ["values_per_row", "values_per_step"])
def test_quantiles_of_values_are_in_their_units_in_order(kind: TargetKind, tmp_path: Path) -> None:
    list(run_of(tmp_path, {"train": str(store_of(tmp_path, kind))}, loss="quantile", quantiles=[0.2, 0.7]).events())
    trained = load_model(tmp_path / "run", "cpu")
    stack = trained.raw_stack.eval()
    for row, result in enumerate(predict(trained, tmp_path / "data")):
        length = int(LENGTHS[row])
        with torch.no_grad():
            y, _ = stack(torch.from_numpy(X[row, :length])[:, None], stack.begin(Rows.of(1, length)))
        y = y[:, 0] if kind.endswith("step") else y[-1, 0]
        expected = np.sort(y.numpy().reshape(*y.shape[:-1], -1, 2), axis=-1).reshape(y.shape)
        names = [f"{name}@{quantile}" for name in result["actual"] for quantile in (0.2, 0.7)]
        assert [*result["values"]] == names
        predicted = np.array([*result["values"].values()], np.float32).T
        assert np.allclose(predicted, expected, rtol=1e-4, atol=1e-4)
    write_predictions(trained, tmp_path / "data", tmp_path / "out.jsonl")
    metrics = compute_metrics(tmp_path / "out.jsonl")
    assert metrics.keys() >= {"pinball loss of y.0", "coverage of y.1, 0.2 to 0.7"}


@pytest.mark.parametrize("kind", ["values_per_row", "values_per_step"])
def test_an_exported_model_gives_the_values_that_predict_gives(kind: TargetKind, tmp_path: Path) -> None:
    list(run_of(tmp_path, {"train": str(store_of(tmp_path, kind))}).events())
    trained = load_model(tmp_path / "run", "cpu")
    export_onnx(trained, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    states = {
        value.name: np.zeros((1, *value.shape[1:]), np.float32) for value in session.get_inputs() if value.name != "x"
    }
    for row, result in enumerate(predict(trained, tmp_path / "data")):
        (y,) = session.run(["y"], {"x": X[row, : LENGTHS[row], None], **states})
        y = y[:, 0] if kind == "values_per_step" else y[-1, 0]
        predicted = np.array([*result["values"].values()], np.float32).T
        assert np.allclose(predicted, y, rtol=1e-4, atol=1e-4)


def test_data_without_targets_is_predicted_too(tmp_path: Path) -> None:
    list(run_of(tmp_path, {"train": str(store_of(tmp_path, "values_per_step"))}).events())
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    bare = tmp_path / "bare.jsonl"
    bare.write_text("".join(json.dumps({"values": record["values"]}) + "\n" for record in records))
    trained = load_model(tmp_path / "run", "cpu")
    with_targets = list(predict(trained, tmp_path / "records.jsonl"))
    without = list(predict(trained, bare))
    assert without == [{name: row[name] for name in ("sequence", "values")} for row in with_targets]


def test_values_to_predict_are_scaled_with_the_training_data(tmp_path: Path) -> None:
    store = store_of(tmp_path, "values_per_row", validation_fraction=0.3)
    run = run_of(tmp_path, {"train": str(store / "train"), "valid": str(store / "valid")})
    windows = run.trainer.windows
    batch = windows.read(Position())
    assert batch.targets is not None
    values = batch.targets[~batch.targets.isnan()].reshape(-1, 3)
    assert values.abs().max() < 5 and (values[:, 2] == 0).all()  # a value that is always the same
    spec = run.data_spec.target_values
    assert spec is not None and spec.names == ("y.0", "y.1", "y.2") and spec.std[2] == 1
    run.close()


def test_long_sequences_with_targets_at_each_time_step_are_cut(tmp_path: Path) -> None:
    store = store_of(tmp_path, "values_per_step")
    run = run_of(tmp_path, {"train": str(store), "context": 2, "scale": "none"})
    items = from_arrays(X, TARGETS["values_per_step"], lengths=LENGTHS).cut(2)
    windows = run.trainer.windows
    assert isinstance(windows, Batches) and windows.items.longest == 2
    assert windows.items.shard_sizes[0] == items.shard_sizes[0]
    rows = [(0, row) for row in range(items.shard_sizes[0])]
    for one, two in zip(
        *(source.read(rows, 2, inputs=True, targets=True) for source in (windows.items, items)), strict=True
    ):
        assert one is not None and two is not None and torch.equal(one.nan_to_num(-1), two.nan_to_num(-1))
    assert windows.items.lengths(0, 0, len(rows)).tolist() == items.num_steps.tolist()
    run.close()
    with pytest.raises(DataError, match="context=2 would cut sequences that have one target each"):
        (tmp_path / "row").mkdir()
        run_of(tmp_path, {"train": str(store_of(tmp_path / "row", "class_per_row")), "context": 2}, "row")


def test_a_fields_scale_is_refused_where_nothing_is_scaled(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"tokens": [1, row % 3], "y": row / 2}) + "\n" for row in range(8)))
    prepare_sequences(path, tmp_path / "values", SequenceOptions(targets=("y",)))
    run_of(tmp_path, {"train": str(tmp_path / "values"), "scale": "none"}).close()
    prepare_sequences(path, tmp_path / "plain")
    with pytest.raises(ConfigError, match="scale='none' has no effect on data without channels"):
        run_of(tmp_path, {"train": str(tmp_path / "plain"), "scale": "none"}, "other")
