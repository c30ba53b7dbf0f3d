"""Text columns and fields as categories when files are prepared."""

import json
from pathlib import Path

import numpy as np
import pandas  # type: ignore[import-untyped]
import pytest

from stretto.data import (
    SequenceOptions,
    Sequences,
    SeriesOptions,
    from_table,
    inspect_data,
    prepare_sequences,
    prepare_series,
)
from stretto.errors import DataError
from stretto.prepare.category_codes import codes_of, to_code
from stretto.prepare.hints import DataHints
from stretto.prepare.sequence_schema import SequenceSchema
from stretto.prepare.series_schema import SeriesSchema
from stretto.store.sequences import Channels

FRAME = pandas.DataFrame(
    {
        "place": ["s", "n", "e", "n"] * 6,
        "open": [True, False] * 12,
        "load": np.arange(24.0),
        "note": [f"note {row}" for row in range(24)],
    }
)


def channels_of(store: Sequences) -> Channels:
    assert isinstance(store.fields.values, Channels)
    return store.fields.values


def values_of(store: Sequences, row: int = 0) -> list[list[float]]:
    values: list[list[float]] = store.read(store.step_ranges([(0, row)]))[0].tolist()
    return values


def write(path: Path) -> Path:
    if path.suffix == ".csv":
        FRAME.to_csv(path, index=False)
    elif path.suffix == ".jsonl":
        FRAME.to_json(path, orient="records", lines=True)
    else:
        FRAME.astype({"place": "category"}).to_parquet(path)
    return path


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_few_texts_and_booleans_become_categories_and_the_rest_is_named(suffix: str, tmp_path: Path) -> None:
    notes: list[str] = []
    (store,) = prepare_series(write(tmp_path / f"a.{suffix}"), tmp_path / "out", on_note=notes.append)
    channels = channels_of(store)
    assert channels.names == ("place", "open", "load")
    assert channels.categories == {"place": ("e", "n", "s"), "open": ("false", "true")}
    assert (channels.mean[:2], channels.std[:2]) == ((0, 0), (1, 1)) and channels.mean[2] == 11.5
    assert values_of(store)[:3] == [[3, 2, 0], [2, 1, 1], [1, 2, 2]]
    assert notes == ["ignored, since neither numbers nor few different texts: note"]
    # The same codes in other data, in which some names are new: 0, which is said once.
    other = FRAME.replace({"place": {"n": "west", "s": ""}}).assign(load=1.0)
    other.to_csv(tmp_path / "b.csv", index=False)
    notes.clear()
    options = SeriesOptions(like=tmp_path / "out", nan="missing")
    if suffix == "csv":
        (like,) = prepare_series(tmp_path / "b.csv", tmp_path / "like", options, on_note=notes.append)
        assert channels_of(like) == channels
        assert np.array_equal(np.array(values_of(like))[:3, 0], [np.nan, 0, 1], equal_nan=True)
        assert notes == ["12 values of 'place' not among its 3 categories in the training data: read as unknown"]


def test_a_named_column_of_many_texts_is_a_category_up_to_a_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv")
    (store,) = prepare_series(path, tmp_path / "a", SeriesOptions(columns=["load", "note"]))
    assert len(channels_of(store).categories["note"]) == 24
    lines = ["load,note", *(f"{row},note {row}" for row in range(1001))]
    (tmp_path / "b.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"'note' has more than 1,000 different texts.*leave it out of the inputs"):
        prepare_series(tmp_path / "b.csv", tmp_path / "b", SeriesOptions(columns=["load", "note"]))


def test_a_typing_error_among_numbers_is_no_category(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("load\nx\n2\n3\nx\n2\n3\n2\n")
    with pytest.raises(DataError, match="row 1: 'load' has \"x\", not a number"):
        prepare_series(tmp_path / "a.csv", tmp_path / "a", SeriesOptions(columns=["load"]))


def test_times_are_no_categories(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("load,day\n" + "1,2026-01-01\n2,2026-01-02\n" * 5)
    (store,) = prepare_series(tmp_path / "a.csv", tmp_path / "a")
    assert channels_of(store).names == ("load",)


def test_the_name_of_a_series_can_be_a_static_category_even_if_it_is_a_number(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,load\n12,1\n12,2\n7,3\n7,4\n")
    (store,) = prepare_series(tmp_path / "a.csv", tmp_path / "a", SeriesOptions(by="id", static=["id"]))
    assert channels_of(store).categories == {"id": ("7", "12")} and values_of(store) == [[1, 2], [2, 2]]
    with pytest.raises(DataError, match="columns=id,load includes by=id; leave it out of the columns"):
        prepare_series(tmp_path / "a.csv", tmp_path / "b", SeriesOptions(by="id", columns=["id", "load"]))


def test_a_static_text_that_changes_within_a_series_is_an_error_with_its_names(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("kind,load\nx,1\ny,2\n")
    with pytest.raises(DataError, match='static=kind is both "x" and "y" in a series'):
        prepare_series(tmp_path / "a.csv", tmp_path / "a", SeriesOptions(static=["kind"]))


def test_records_have_a_text_per_time_step_or_one_for_the_sequence(tmp_path: Path) -> None:
    records = [
        {"load": [1, 2.5, 3], "kind": "a", "sky": ["sun", None, "rain"], "y": 1.0},
        {"load": [4.5, 5], "kind": "b", "sky": ["rain", "fog"], "y": 2.0},
    ]
    options = SequenceOptions(inputs=["kind", "load", "sky"], targets="y", target_kind="values_per_row")
    for name in ("jsonl", "csv"):
        path = tmp_path / f"a.{name}"
        if name == "jsonl":
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
        else:
            rows = [{key: json.dumps(value) for key, value in record.items()} for record in records]
            rows = [{**row, "kind": record["kind"]} for row, record in zip(rows, records, strict=True)]  # type: ignore[dict-item]
            pandas.DataFrame(rows).to_csv(path, index=False)
        (store,) = prepare_sequences(path, tmp_path / name, options)
        assert channels_of(store).categories == {"kind": ("a", "b"), "sky": ("fog", "rain", "sun")}
        expected: list[list[float]] = [[1, 1, 3], [1, 2.5, np.nan], [1, 3, 2]]
        assert np.array_equal(values_of(store), expected, equal_nan=True)
        assert values_of(store, 1) == [[2, 4.5, 2], [2, 5, 1]]
    schema = inspect_data(tmp_path / "a.jsonl", DataHints(inputs=("load", "kind"), targets=("y",))).schema
    assert isinstance(schema, SequenceSchema) and schema.label is None and schema.inputs == ("load", "kind")
    with pytest.raises(DataError, match="'sky' has 2 time steps, but 'load' has 3; make them equal"):
        prepare_sequences([{**records[0], "sky": ["sun", "fog"]}], tmp_path / "b", options)


def test_fields_that_are_not_used_are_named(tmp_path: Path) -> None:
    notes: list[str] = []
    records = [{"values": [1, 2], "who": "me", "y": "a"}]
    prepare_sequences(records, tmp_path / "a", SequenceOptions(label="y"), on_note=notes.append)
    assert notes == ["fields that are not used: who (inputs=NAMES, label=FIELD and targets=NAMES choose)"]


def test_rows_of_a_table_keep_their_categories_in_a_store(tmp_path: Path) -> None:
    items = from_table(FRAME, ["place", "load"], "open").cut(6)
    (store,) = prepare_sequences(items, tmp_path / "a")
    assert channels_of(store).categories == {"inputs.0": ("e", "n", "s")}
    assert values_of(store) == items.inputs[0].tolist()
    (single,) = prepare_sequences(from_table(FRAME, "place", "open"), tmp_path / "b")
    assert values_of(single)[:3] == [[3], [2], [1]]


def test_inspection_and_preparation_agree_on_what_a_category_is(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "load,grade,place\n" + "".join(f"{row * row % 7},{'AB7'[row % 3]},{'en'[row % 2]}\n" for row in range(24))
    )
    inspection = inspect_data([path])
    assert isinstance(inspection.schema, SeriesSchema)
    assert (inspection.schema.columns, inspection.schema.categories) == (("load", "place"), ("place",))
    assert any("grade (texts and numbers)" in note for note in inspection.notes)
    (store,) = prepare_series(path, tmp_path / "out", SeriesOptions(columns=inspection.schema.columns))
    assert channels_of(store).categories == {"place": ("e", "n")}
    (plain,) = prepare_series(path, tmp_path / "plain")
    assert channels_of(plain) == channels_of(store)


def test_a_text_in_brackets_in_a_table_is_one_category(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("load,kind\n" + "1,a\n2,[1]\n" * 5)
    (store,) = prepare_series(tmp_path / "a.csv", tmp_path / "a")
    assert channels_of(store).categories == {"kind": ("[1]", "a")} and values_of(store)[:2] == [[1, 2], [2, 1]]


@pytest.mark.parametrize("names", [("False", "True"), ("false", "true")])
def test_booleans_have_the_same_codes_in_each_format(names: tuple[str, str], tmp_path: Path) -> None:
    codes = codes_of(names)
    for values in (("False", "True"), ("false", "true"), ("FALSE", "TRUE"), (False, True)):
        assert [to_code(value, "open", codes) for value in values] == [1, 2]
    assert to_code("yes", "open", codes) == 0 == to_code("true", "open", codes_of(["True", "no"]))
    (store,) = prepare_series(write(tmp_path / "a.csv"), tmp_path / "csv")
    (like,) = prepare_series(write(tmp_path / "a.jsonl"), tmp_path / "jsonl", SeriesOptions(like=tmp_path / "csv"))
    assert values_of(like) == values_of(store)
