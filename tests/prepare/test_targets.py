"""Targets of records: which kind they are, and what is wrong with them in one sentence."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.data import (
    DataHints,
    SequenceOptions,
    Sequences,
    SequenceSchema,
    inspect_data,
    prepare_data,
    prepare_sequences,
)
from stretto.errors import DataError
from stretto.store.sequences import Classes, TargetValues


def jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prepared(folder: Path, records: list[dict[str, Any]], **options: object) -> Sequences:
    path = jsonl(folder / "a.jsonl", records)
    (store,) = prepare_sequences(path, folder / "out", SequenceOptions(**options))  # type: ignore[arg-type]
    return store


def rows_with(*targets: object) -> list[dict[str, Any]]:
    """Records of two to four time steps, with these targets."""
    return [{"values": [0.5] * (2 + row % 3), "y": target} for row, target in enumerate(targets)]


@pytest.mark.parametrize(
    ("records", "kind"),
    [
        (rows_with("a", "b"), "class_per_row"),
        (rows_with(1, 0), "class_per_row"),
        (rows_with(True, False), "class_per_row"),
        (rows_with(1.0, 2.5), "values_per_row"),
        (rows_with(1.0, float("nan"), 2.0), "values_per_row"),
        (rows_with([1.0, 2.5, 3.5], [1, 2, 3]), "values_per_row"),
        (rows_with(["a", None], ["b", "a", "a"]), "class_per_step"),
        (rows_with([1, 0], [1, 0, 1]), "class_per_step"),
        (rows_with([1.5, 0], [1, 0, 1]), "values_per_step"),
        (rows_with([[1.5, 2], [3, 4]], [[1, 2], [None, 4], [5, 6]]), "values_per_step"),
    ],
)
def test_the_kind_follows_from_the_values(records: list[dict[str, Any]], kind: str, tmp_path: Path) -> None:
    store = prepared(tmp_path, records, targets="y", nan="missing")
    assert store.fields.targets is not None and store.fields.targets.kind == kind


@pytest.mark.parametrize(
    ("targets", "kind", "stored"),
    [
        (["b", None, "a"], "class_per_row", [1, -100, 0]),
        ([1, -100, 0], "class_per_row", [1, -100, 0]),
        ([1.0, float("nan"), -100.0], "class_per_row", [0, -100, -100]),
        ([[1, 2.5], None, [3, None]], "values_per_row", [[1, 2.5], [np.nan, np.nan], [3, np.nan]]),
        ([[-100, 1], None, [0] * 4], "class_per_step", [[-100, 1], [-100] * 3, [0] * 4]),
        ([None, [1.5, None, 2], None], "values_per_step", [[[np.nan]] * 2, [[1.5], [np.nan], [2]], [[np.nan]] * 4]),
        (
            [[None, None], [None, [1, 2.5], None], None],
            "values_per_step",
            [[[np.nan] * 2] * 2, [[np.nan] * 2, [1, 2.5], [np.nan] * 2], [[np.nan] * 2] * 4],
        ),
    ],
)
def test_null_is_a_missing_target_of_any_kind(
    targets: list[object], kind: str, stored: list[object], tmp_path: Path
) -> None:
    store = prepared(tmp_path, rows_with(*targets), targets="y", target_kind=kind, nan="missing")
    rows = [(0, row) for row in range(3)]
    per_row = kind.endswith("row")
    values = store.read_row_targets(rows) if per_row else store.read_step_targets(store.step_ranges(rows))
    for value, expected in zip(values, stored, strict=True):
        np.testing.assert_array_equal(value, expected)


def test_several_fields_are_a_vector_per_row_or_per_time_step(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [{"values": [1, 2], "a": 0.5, "b": 3}, {"values": [1, 2], "a": None, "b": 4}]
    store = prepared(tmp_path, records, targets=("a", "b"))
    assert isinstance(store.fields.targets, TargetValues) and store.fields.targets.names == ("a", "b")
    one, two = store.read_row_targets([(0, 0), (0, 1)])
    assert one.tolist() == [0.5, 3] and np.isnan(two[0]) and two[1] == 4
    (tmp_path / "steps").mkdir()
    records = [{"values": [1, 2], "a": [1, 2], "b": [3, 4]}]
    store = prepared(tmp_path / "steps", records, targets=("a", "b"))
    assert store.fields.targets is not None and store.fields.targets.kind == "values_per_step"
    assert store.read_step_targets(store.step_ranges([(0, 0)]))[0].tolist() == [[1, 3], [2, 4]]


def test_inputs_can_be_one_field_per_channel(tmp_path: Path) -> None:
    records = [{"heat": [1.5, 2], "wind": [3, 4], "y": ["a", "b"]}, {"heat": [5], "wind": [6], "y": [None]}]
    store = prepared(tmp_path, records, inputs=("heat", "wind"), targets=("y",))
    assert store.fields.values.type == "channels" and store.fields.values.names == ("heat", "wind")
    one, two = store.read(store.step_ranges([(0, 0), (0, 1)]))
    assert one.tolist() == [[1.5, 3], [2, 4]] and two.tolist() == [[5, 6]]
    assert isinstance(store.fields.targets, Classes) and store.fields.targets.names == ("a", "b")
    (tmp_path / "bad").mkdir()
    with pytest.raises(DataError, match=r"row 2: 'wind' has 1 time steps, but 'heat' has 2; make them equal"):
        prepared(tmp_path / "bad", [*records[:1], {"heat": [5, 6], "wind": [6], "y": [1, 2]}], inputs=("heat", "wind"))


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        (
            rows_with([1.0, 2.0]),
            {"targets": ("y",)},
            "could be values of a row or of its time steps; set target_kind to",
        ),
        (
            rows_with([1], [0]),
            {"targets": ("y",)},
            r"lists of integers such as \[1\] are not as long as .* or classes.*; set target_kind to values_per_row",
        ),
        (rows_with("a", "b"), {"targets": ("z",)}, "targets=z is not a field of .*; choose from values, y"),
        (rows_with("a"), {"targets": ("y",), "label": "y"}, "label=y can't be combined with targets"),
        (rows_with("a"), {"targets": ("values",)}, "'values' can't be both an input and a target"),
        (
            rows_with(1.5, "b"),
            {"targets": ("y",), "target_kind": "values_per_row"},
            "row 2: 'y' has \"b\", not a number",
        ),
        (
            rows_with([1, 2, 3]),
            {"targets": ("y",), "target_kind": "class_per_step"},
            "'y' has 3 targets, but the sequence .*; give one per time step; null, or NaN or -100 in arrays, is a",
        ),
        ([{"values": [[]], "y": 1}], {}, "row 1: 'values' has an empty list at a time step; write the values of its"),
        (
            rows_with([[], []]),
            {"targets": ("y",), "target_kind": "values_per_step"},
            "row 1: 'y' has an empty list of values; leave the field out",
        ),
        (
            rows_with([1.5, 2], [3]),
            {"targets": ("y",), "target_kind": "values_per_row"},
            "row 2: 'y' has 1 values in this",
        ),
        (rows_with(None, None), {"targets": ("y",)}, "targets=y has no value in the first rows"),
        (rows_with("a"), {"target_kind": "class_per_row"}, "target_kind=class_per_row needs targets"),
        (rows_with("a"), {"targets": ("y",), "target_kind": "horizon"}, "target_kind='horizon' is not allowed; choose"),
        (rows_with("a"), {"inputs": ("a", "a")}, "inputs=a,a names a field more than once; name each field once"),
        (rows_with("a"), {"targets": ("y", "")}, "targets=y, has an empty name"),
        (rows_with(["a", None], [None] * 3), {"targets": ("y", "values")}, "can't be both an input and a target"),
    ],
)
def test_a_mistake_is_one_sentence(
    records: list[dict[str, Any]], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        prepared(tmp_path, records, **options)


def test_other_data_is_prepared_like_the_first(tmp_path: Path) -> None:
    first = prepared(tmp_path, rows_with(1.5, 2.5, 3.5), targets=("y",))
    path = jsonl(tmp_path / "b.jsonl", rows_with(7.5, 9.0))
    options = SequenceOptions(targets=("y",), like=tmp_path / "out")
    (second,) = prepare_sequences(path, tmp_path / "second", options)
    assert second.fields.targets == first.fields.targets  # with the mean and std of the first
    with pytest.raises(DataError, match=r"like=.* has targets of kind values_per_row, not class_per_row"):
        prepare_sequences(jsonl(tmp_path / "c.jsonl", rows_with("a")), tmp_path / "third", options)


def schema_of(path: Path, hints: DataHints | None = None) -> SequenceSchema:
    schema = inspect_data(path, hints or DataHints()).schema
    assert isinstance(schema, SequenceSchema)
    return schema


def test_inspection_recognizes_targets_by_their_names_and_values(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    records = [{"inputs": draw.normal(size=(3, 2)).tolist(), "y": draw.normal(size=4).tolist()} for _ in range(20)]
    schema = schema_of(jsonl(tmp_path / "a.jsonl", records))
    assert (schema.sequence, schema.targets, schema.target_kind) == ("inputs", ("y",), "values_per_row")
    records = [{"text": "the red fox", "tags": ["D", "A", "N"]}, {"text": "a fox", "tags": ["D", "N"]}] * 5
    schema = schema_of(jsonl(tmp_path / "b.jsonl", records))
    assert (schema.level, schema.targets, schema.target_kind) == ("word", ("tags",), "class_per_step")
    prepared_data = prepare_data(inspect_data(tmp_path / "b.jsonl"), tmp_path / "data", validation_fraction=0)
    assert isinstance(prepared_data.train, Sequences)
    assert prepared_data.train.fields.targets == Classes(names=("A", "D", "N"), per_step=True)
    records = [{"values": [1.0] * (row % 3 + 1), "price": row + 0.5, "mood": "ab"[row % 2]} for row in range(20)]
    path = jsonl(tmp_path / "c.jsonl", records)
    assert schema_of(path).label == "mood"
    schema = schema_of(path, DataHints(targets=("price",)))
    assert (schema.label, schema.targets, schema.target_kind) == (None, ("price",), "values_per_row")
    assert schema_of(path, DataHints(targets=("mood",))).label == "mood"
    assert not schema_of(path, DataHints(has_label=False)).target_fields
    with pytest.raises(DataError, match=r"targets=cost is not a field of .*; choose from values, price, mood"):
        schema_of(path, DataHints(targets=("cost", "price")))
