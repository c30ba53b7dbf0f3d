"""What is inferred about files that nobody has described."""

import gzip
import json
import math
import random
import time
from collections.abc import Iterable
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.data import (
    DataHints,
    Inspection,
    Sequences,
    SequenceSchema,
    SeriesSchema,
    TextSchema,
    inspect_data,
    prepare_data,
)
from stretto.errors import AmbiguousInputError, DataError
from stretto.prepare.time_formats import looks_like_time

WORDS = ["the", "theme", "enters", "before", "it", "has", "ended", "and", "then", "another", "voice"]


def jsonl(path: Path, records: Iterable[object]) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def table(path: Path, header: str, rows: Iterable[Iterable[object]]) -> Path:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def text_data(inspection: Inspection) -> TextSchema:
    assert isinstance(inspection.schema, TextSchema)
    return inspection.schema


def sequence_schema(inspection: Inspection) -> SequenceSchema:
    assert isinstance(inspection.schema, SequenceSchema)
    return inspection.schema


def series_schema(inspection: Inspection) -> SeriesSchema:
    assert isinstance(inspection.schema, SeriesSchema)
    return inspection.schema


def prose(row: int) -> str:
    draw = random.Random(row)
    return " ".join(draw.choices(WORDS, k=8))


def hours(count: int, **step: int) -> list[datetime]:
    return [datetime(2025, 1, 1) + number * timedelta(**(step or {"hours": 1})) for number in range(count)]


def test_text_is_read_as_bytes_by_default(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ein Äther\n" * 9)
    inspection = inspect_data(tmp_path / "a.txt")
    assert (inspection.kind, inspection.schema, inspection.num_bytes) == ("text", TextSchema("byte"), 99)
    assert text_data(inspect_data(tmp_path / "a.txt", DataHints(level="word"))).level == "word"


def test_text_that_is_not_utf8_is_read_as_bytes_only(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("ein Äther\n".encode("latin-1"))
    inspection = inspect_data(tmp_path / "a.txt")
    assert inspection.schema == TextSchema("byte", is_utf8=False) and "not UTF-8 (byte 5)" in inspection.notes[0]
    with pytest.raises(DataError, match=r"byte 5 is not UTF-8; convert the file, or use level=byte"):
        inspect_data(tmp_path / "a.txt", DataHints(level="word"))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", b"", "is empty; choose a different file"),
        ("a.txt", b"text\0\x01", "is not text: byte 5 is 0x00"),
        ("a.csv", b"\x7fELF\2\1", "is not text: byte 5 is 0x02"),
        ("a.txt.xz", b"x", "is compressed or an archive (.xz); unpack it first"),
        ("a.tar.gz", b"x", "is compressed or an archive (.tar); unpack it first"),
        ("a.npz.gz", b"x", "is .npz in .gz, so it is compressed twice; unpack it first"),
        ("a.txt.gz", b"x", "can't be decompressed (Not a gzipped file (b'x')); copy or write it again"),
        ("a.txt.gz", gzip.compress(b"", mtime=0), "is empty; choose a different file"),
        ("a.json", b"{}", "which is not supported; convert it to JSONL"),
        ("a.csv", b"1,2\n3,4\n", "its first line is blank or has only numbers and times"),
        ("a.csv", b"2025-01-01,2\n2025-01-02,4\n", "its first line is blank or has only numbers and times"),
        ("a.csv", b"01/02/2025 10:00,2\n01/02/2025 11:00,4\n", "its first line is blank or has only numbers and times"),
        ("a.csv", b"a,b\n", "has no rows"),
        ("a.jsonl", b'{"a": true}\n{"a": false}\n', "neither text nor numbers"),
        ("a.jsonl", b"[1]\n", "none of its first rows can be read (the first: the line is not a JSON object"),
        ("a.parquet", b"PAR1", "can't be read"),
    ],
)
def test_an_unreadable_file_is_one_sentence(name: str, content: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        inspect_data(tmp_path / name)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_a_path_without_files_is_an_error(tmp_path: Path) -> None:
    for path, sentence in ((tmp_path / "gone", "does not exist"), (tmp_path, "is a folder without visible files")):
        with pytest.raises(DataError, match=sentence):
            inspect_data(path)


def test_files_of_several_formats_are_ambiguous(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about it")
    (tmp_path / "a.txt").write_text("some text")
    jsonl(tmp_path / "b.jsonl", ({"text": prose(row)} for row in range(9)))
    with pytest.raises(AmbiguousInputError, match="format=NAME") as unclear:
        inspect_data(tmp_path)
    assert (unclear.value.hint, unclear.value.choices) == ("format", ("text", "jsonl"))
    inspection = inspect_data(tmp_path, DataHints(format="jsonl"))
    assert inspection.paths == (tmp_path / "b.jsonl",) and inspection.notes == ("ignored: README.md, a.txt",)


def test_validation_files_are_recognized_by_their_names(tmp_path: Path) -> None:
    for name in ("train", "valid", "test"):
        (tmp_path / f"wiki.{name}.txt").write_text(name)
    inspection = inspect_data(tmp_path)
    assert [path.name for path in (*inspection.paths, *inspection.valid_paths)] == ["wiki.train.txt", "wiki.valid.txt"]
    assert "ignored: wiki.test.txt" in inspection.notes


@pytest.mark.parametrize("is_given_separately", [False, True])
def test_validation_files_are_recognized_by_their_folders(is_given_separately: bool, tmp_path: Path) -> None:
    # What stands above the given folder says nothing.
    root = tmp_path / "test-data"
    for name in ("train/pos", "valid", "test"):
        (root / name).mkdir(parents=True)
        (root / name / "test.txt").write_text(name)
    inspection = inspect_data([root / "train", root / "valid", root / "test"] if is_given_separately else root)
    assert (inspection.paths, inspection.valid_paths) == ((root / "train/pos/test.txt",), (root / "valid/test.txt",))
    assert inspect_data(root / "train/pos/test.txt").paths == (root / "train/pos/test.txt",)


def test_records_are_sequences_and_the_only_possible_label_is_used(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ({"id": row, "text": prose(row), "stars": row % 5} for row in range(50)))
    inspection = inspect_data(path)
    assert inspection.kind == "sequences"
    assert inspection.schema == SequenceSchema("text", "text", level="word", label="stars")
    assert inspection.num_rows == 50 and "has_label=False" in inspection.notes[0]
    unlabeled = sequence_schema(inspect_data(path, DataHints(has_label=False)))
    assert (unlabeled.label, unlabeled.level) == (None, "byte")


def test_letters_without_words_are_read_as_bytes(tmp_path: Path) -> None:
    draw = random.Random(1)
    rows = ({"text": "".join(draw.choices("abcdefgh ", k=30)), "label": row % 2} for row in range(50))
    assert sequence_schema(inspect_data(jsonl(tmp_path / "a.jsonl", rows))).level == "byte"


def test_several_labels_are_ambiguous_unless_one_is_called_label(tmp_path: Path) -> None:
    rows = [{"text": prose(row), "stars": row % 5, "language": "ab"[row % 2]} for row in range(50)]
    with pytest.raises(AmbiguousInputError, match=r"\(stars, language\); choose one with label=FIELD, or") as unclear:
        inspect_data(jsonl(tmp_path / "a.jsonl", rows))
    assert unclear.value.hint == "label"
    named = jsonl(tmp_path / "b.jsonl", ({**row, "label": row["stars"]} for row in rows))
    assert sequence_schema(inspect_data(named)).label == "label"
    assert sequence_schema(inspect_data(tmp_path / "a.jsonl", DataHints(label="stars"))).label == "stars"


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_file_that_is_sorted_by_its_label_has_one(kind: str, tmp_path: Path) -> None:
    rows = [{"text": prose(row), "label": "np"[row >= 3000], "y": int(row >= 3000)} for row in range(6000)]
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        jsonl(path, rows)
    elif kind == "csv":
        table(path, "text,label,y", (row.values() for row in rows))
    else:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    data = sequence_schema(inspect_data(path))
    assert (data.label, data.other_labels) == ("label", ("y",))


def test_a_label_with_one_value_in_the_rows_read_is_ambiguous(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ({"text": prose(row), "label": row // 3000 % 2} for row in range(9000)))
    with pytest.raises(
        AmbiguousInputError, match=r"'label' has the same value in .* label=label .* has_label=False"
    ) as e:
        inspect_data(path)
    assert (e.value.hint, e.value.choices) == ("label", ("label", "none"))
    assert sequence_schema(inspect_data(path, DataHints(label="label"))).label == "label"
    assert sequence_schema(inspect_data(path, DataHints(has_label=False))).label is None


def test_several_texts_are_ambiguous_unless_one_is_called_text(tmp_path: Path) -> None:
    rows = [{"title": prose(row), "body": prose(row + 99)} for row in range(50)]
    with pytest.raises(AmbiguousInputError, match="choose one with sequence=FIELD"):
        inspect_data(jsonl(tmp_path / "a.jsonl", rows))
    named = jsonl(tmp_path / "b.jsonl", ({**row, "text": "x"} for row in rows))
    assert sequence_schema(inspect_data(named)).sequence == "text"


def test_a_few_repeated_texts_are_sequences_if_there_is_nothing_else(tmp_path: Path) -> None:
    rows = ({"said": ["it was good", "it was bad"][row % 2], "fine": row % 2 == 0} for row in range(50))
    data = sequence_schema(inspect_data(jsonl(tmp_path / "a.jsonl", rows)))
    assert (data.sequence, data.label) == ("said", "fine")


def test_lists_are_tokens_or_channels(tmp_path: Path) -> None:
    tokens = jsonl(tmp_path / "a.jsonl", ({"ids": [1, 2, row]} for row in range(9)))
    channels = table(tmp_path / "b.csv", "signal,kind", ([f'"[[0.5, {row}], [1, 2]]"', row % 2] for row in range(9)))
    assert inspect_data(tokens).schema == SequenceSchema("ids", "tokens")
    assert inspect_data(channels).schema == SequenceSchema("signal", "channels", label="kind")


@pytest.mark.parametrize(
    ("name", "lists", "holds"),
    [
        ("signal", [[1, 2], [Decimal("0.5")]], "channels"),
        ("signal", [[Decimal(1), None], [Decimal("0.5")]], "channels"),
        ("signal", [[1, 2], [3]], "tokens"),
        ("values", [[1, 2], [3]], "channels"),
    ],
)
def test_lists_are_prepared_as_they_were_inspected(
    name: str, lists: list[list[object]], holds: str, tmp_path: Path
) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    is_decimal = any(isinstance(step, Decimal) for steps in lists for step in steps)
    kind = pyarrow.list_(pyarrow.decimal128(9, 3) if is_decimal else pyarrow.int64())
    parquet.write_table(pyarrow.table({name: pyarrow.array(lists, kind)}), tmp_path / "a.parquet")
    inspection = inspect_data(tmp_path / "a.parquet")
    assert sequence_schema(inspection).value_type == holds
    train = prepare_data(inspection, tmp_path / "data", validation_fraction=0).train
    assert isinstance(train, Sequences) and train.fields.values.type == holds


def test_whole_numbers_in_the_first_list_make_no_tokens_of_the_others(tmp_path: Path) -> None:
    inspection = inspect_data(jsonl(tmp_path / "a.jsonl", ({"signal": [1, row / 2 if row else 0]} for row in range(9))))
    train = prepare_data(inspection, tmp_path / "data", validation_fraction=0).train
    assert isinstance(train, Sequences)
    assert sequence_schema(inspection).value_type == train.fields.values.type == "channels"


def test_a_table_that_could_be_sequences_or_series_is_ambiguous(tmp_path: Path) -> None:
    rows = ([when, prose(row), row / 2] for row, when in enumerate(hours(50)))
    path = table(tmp_path / "a.csv", "when,said,load", rows)
    with pytest.raises(AmbiguousInputError, match=r"kind=sequences .* kind=series"):
        inspect_data(path)
    assert sequence_schema(inspect_data(path, DataHints(kind="sequences"))).sequence == "said"
    assert series_schema(inspect_data(path, DataHints(kind="series"))).columns == ("load",)


def wave(path: Path, step: timedelta, num_rows: int = 600) -> SeriesSchema:
    rows = ([datetime(2025, 1, 1) + row * step, row % 5] for row in range(num_rows))
    return series_schema(inspect_data(table(path, "date,load", rows)))


@pytest.mark.parametrize(
    ("step", "period"),
    [(timedelta(hours=1), 24), (timedelta(minutes=15), 96), (timedelta(days=1), 7), (timedelta(seconds=1), 60)],
)
def test_the_period_follows_from_the_interval_of_the_rows(step: timedelta, period: int, tmp_path: Path) -> None:
    data = wave(tmp_path / "a.csv", step)
    assert data == SeriesSchema(("load",), time="date", seconds=step.total_seconds(), period=period)
    assert wave(tmp_path / "b.csv", step, num_rows=3 * period - 1).period == 0, "too short to tell"


@pytest.mark.parametrize(
    "written",
    ["%Y-%m", "%d/%m/%y", "%YQ%m", "%b-%y", "%B %d, %Y"],
)
def test_times_that_cannot_be_parsed_leave_the_rows_in_the_order_of_the_file(written: str, tmp_path: Path) -> None:
    rows = ([f'"{when.strftime(written)}"', row % 7] for row, when in enumerate(hours(90, days=5)))
    inspection = inspect_data(table(tmp_path / "a.csv", "at,load", rows))
    assert inspection.kind == "series" and inspection.schema == SeriesSchema(("load",))
    assert "times in 'at' (" in inspection.notes[0] and "rows are time steps in the order" in inspection.notes[0]
    prepared = prepare_data(inspection, tmp_path / "data")
    assert prepared.train.location and prepared.valid is not None


def test_text_in_a_column_of_times_is_not_a_sequence(tmp_path: Path) -> None:
    rows = ([f"day {row} of it", row % 7] for row in range(50))
    inspection = inspect_data(table(tmp_path / "a.csv", "Date,load", rows))
    assert series_schema(inspection).columns == ("load",) and "times in 'Date' (day 0 of it)" in inspection.notes[0]


@pytest.mark.parametrize("text", ["1 2 3 4 5", "abc 12", "3.5.1.2.9", "may", "marching 12 by 40", "12-", "1/2/3/4"])
def test_other_text_with_digits_is_not_a_time(text: str) -> None:
    assert not looks_like_time(text)


def test_columns_of_few_texts_are_categories_and_others_are_ignored_with_a_note(tmp_path: Path) -> None:
    rows = ([when, row, ["sun", "rain"][row % 2], "", f"remark {row}"] for row, when in enumerate(hours(50)))
    path = table(tmp_path / "a.csv", "date,load,sky,empty,remark", rows)
    inspection = inspect_data(path, DataHints(kind="series"))
    schema = series_schema(inspection)
    assert schema.columns == ("load", "sky") and schema.by is None
    assert schema.categories == ("sky",) and schema.numbers == ("load",)
    assert inspection.notes == (
        "read as categories: sky (inputs=NAMES chooses the columns to read)",
        "ignored, since neither numbers nor few different texts: empty (empty), remark (text)",
    )
    named = inspect_data(path, DataHints(kind="series", inputs=("load", "remark")))
    assert series_schema(named).categories == ("remark",) and not named.notes


@pytest.mark.parametrize("written", ["nan", "NA", "N/A", " null", "None"])
def test_missing_values_are_recognized(written: str, tmp_path: Path) -> None:
    rows = [[when, row if row % 5 else written] for row, when in enumerate(hours(50))]
    inspection = inspect_data(table(tmp_path / "a.csv", "date,load", rows))
    assert (series_schema(inspection).has_missing, series_schema(inspection).nan) == (True, "missing")
    assert inspection.notes == ("NA, NaN or infinity in load: read as missing values (nan=error rejects them)",)
    train = prepare_data(inspection, tmp_path / "data").train
    assert isinstance(train, Sequences)
    assert np.isnan(train.read(train.step_ranges([(0, 0)]))[0]).sum() == 8
    assert not series_schema(inspect_data(table(tmp_path / "b.csv", "date,load", rows[1:5]))).has_missing


def test_a_row_counter_is_not_a_channel(tmp_path: Path) -> None:
    inspection = inspect_data(table(tmp_path / "a.csv", "row,load", ([row, row % 7] for row in range(50))))
    assert inspection.schema == SeriesSchema(("load",), time="row")


def test_a_column_with_grouped_values_names_the_series(tmp_path: Path) -> None:
    rows = [[when, meter, row] for meter in "abc" for row, when in enumerate(hours(20))]
    assert series_schema(inspect_data(table(tmp_path / "a.csv", "date,meter,load", rows))).by == "meter"
    mixed = sorted(rows, key=lambda row: str(row[0]))
    with pytest.raises(DataError, match="rows of different series are mixed; sort them by 'meter', then by 'date'"):
        inspect_data(table(tmp_path / "b.csv", "date,meter,load", mixed))


def test_several_series_are_recognized_if_only_the_first_is_read(tmp_path: Path) -> None:
    rows = [[when, meter, row] for meter in ("one", "two") for row, when in enumerate(hours(2500))]
    assert series_schema(inspect_data(table(tmp_path / "a.csv", "date,meter,load", rows))).by == "meter"


def test_several_columns_of_times_are_ambiguous(tmp_path: Path) -> None:
    rows = ([when, when, row] for row, when in enumerate(hours(50)))
    with pytest.raises(AmbiguousInputError, match="choose one with time=COLUMN"):
        inspect_data(table(tmp_path / "a.csv", "opened,closed,load", rows))


def test_an_unknown_field_is_an_error(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", "date,load", ([when, 1] for when in hours(9)))
    with pytest.raises(DataError, match=r"time=day is not a field of .*; choose from date, load"):
        inspect_data(path, DataHints(time="day"))


def test_parquet_and_csv_give_the_same_inspection(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [(when, math.sin(row * math.pi / 12)) for row, when in enumerate(hours(200))]
    columns = {"date": [when for when, _ in rows], "load": [value for _, value in rows]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    one = inspect_data(tmp_path / "a.parquet")
    other = inspect_data(table(tmp_path / "a.csv", "date,load", rows))
    assert one.kind == "series" and one.schema == other.schema and one.num_rows == other.num_rows


def test_a_parquet_file_that_ends_with_an_empty_row_group_is_inspected(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = pyarrow.table({"text": [prose(row) for row in range(200)]})
    with parquet.ParquetWriter(tmp_path / "a.parquet", rows.schema) as writer:
        writer.write_table(rows)
        writer.write_table(rows.slice(0, 0))
    assert parquet.ParquetFile(tmp_path / "a.parquet").metadata.num_row_groups == 2
    assert inspect_data(tmp_path / "a.parquet").num_rows == 200


def test_only_the_ends_of_a_huge_file_are_read(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ({"text": prose(row)} for row in range(30_000)))
    small = path.stat().st_size
    with path.open("r+b") as file:
        # A hole: it has a size, and no place on the disk.
        file.truncate(40 << 30)
    started = time.perf_counter()
    inspection = inspect_data(path)
    assert time.perf_counter() - started < 10
    assert inspection.num_rows == pytest.approx(30_000 * (40 << 30) / small, rel=0.1)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.one_of(
        st.binary(max_size=200),
        st.text(max_size=200).map(str.encode),
        st.lists(
            st.dictionaries(st.text(max_size=3), st.one_of(st.none(), st.integers(), st.text(max_size=5)), max_size=3)
        ).map(lambda records: "\n".join(map(json.dumps, records)).encode()),
    ),
    suffix=st.sampled_from([".txt", ".csv", ".jsonl", ".parquet", ""]),
)
def test_any_file_gives_an_inspection_or_our_error(content: bytes, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    try:
        inspection = inspect_data(path)
    except DataError as error:
        assert str(error)
    else:
        assert inspection.paths == (path,)
