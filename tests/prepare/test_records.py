import csv
import json
import os
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.base.bounded_read import MAX_READ_BYTES
from stretto.errors import DataError
from stretto.prepare import csv_cells, records
from stretto.prepare.record_sample import sample_records
from stretto.prepare.records import cut_records, list_paths, read_rows

RECORDS = [{"text": f"wörd {number}", "label": number % 3} for number in range(50)]


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def read(path: Path, part_bytes: int | None) -> list[dict[str, Any]]:
    return [dict(row.record) for part in cut_records([path], part_bytes) for row in read_rows(part)]


@pytest.mark.parametrize("format", ["jsonl", "parquet", "datasets"])
@pytest.mark.parametrize("part_bytes", [1, 333, None])
def test_the_parts_hold_all_rows_in_order(format: str, part_bytes: int | None, tmp_path: Path) -> None:
    path = tmp_path / f"a.{format}"
    if format == "jsonl":
        write_jsonl(path, RECORDS)
    elif format == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path, row_group_size=7)
    else:
        datasets.disable_progress_bars()
        datasets.Dataset.from_list(RECORDS).save_to_disk(path)
    assert read(path, part_bytes) == RECORDS
    assert (len(cut_records([path], part_bytes)) > 1) == (part_bytes is not None)


@given(lines=st.lists(st.integers(0, 10**6), min_size=1, max_size=30), part_bytes=st.integers(1, 60))
@settings(max_examples=30, deadline=None)
def test_the_number_of_a_row_is_that_of_its_line(
    lines: list[int], part_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("records") / "a.jsonl"
    path.write_text("".join(json.dumps({"x": line}) + "\n" * (1 + line % 2) for line in lines))
    there = path.read_text().split("\n")
    for part in cut_records([path], part_bytes):
        for row in read_rows(part):
            assert json.loads(there[part.row_number(row.row_index) - 1]) == row.record


def test_a_byte_order_mark_is_not_part_of_the_first_line(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    for part_bytes in (None, 100):
        assert read(path, part_bytes) == RECORDS


def test_a_csv_is_its_cells_under_the_names_of_its_header(tmp_path: Path) -> None:
    path = tmp_path / "a.CSV"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([["text", "label"], ["two\nlines", "a,b"], ["x" * 200_000, ""]])
    assert read(path, None) == [{"text": "two\nlines", "label": "a,b"}, {"text": "x" * 200_000, "label": ""}]


@pytest.mark.parametrize(
    ("content", "cells"),
    [
        ("x\n1\n\n3\n", ["1", "", "3"]),
        ("x\n\n\n3", ["", "", "3"]),
        ("x\r\n1\r\n\r\n", ["1"]),
        ("x\n1\n\n\n", ["1", ""]),
        ('x\n1\n""\n', ["1", ""]),
    ],
)
def test_a_blank_line_in_a_single_column_is_an_empty_cell_unless_it_is_the_last(
    content: str, cells: list[str], tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_bytes(content.encode())
    (part,) = cut_records([tmp_path / "a.csv"], None)
    assert [(row.row_index, row.record["x"]) for row in read_rows(part)] == list(enumerate(cells))


def test_a_blank_line_in_several_columns_is_not_a_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n\n3,4\n")
    assert read(tmp_path / "a.csv", None) == [{"x": "1", "y": "2"}, {"x": "3", "y": "4"}]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.tsv", "x\ty, z\n1\t2,5\n", {"x": "1", "y, z": "2,5"}),
        ("a.tsv", "x\n1,5; 2\n", {"x": "1,5; 2"}),
        ("a.csv", "x\ty\n1\t2\n", {"x": "1", "y": "2"}),
        ("a.csv", "x;y\r\n1,5;-1.234,5e3\r\n", {"x": "1,5", "y": "-1.234,5e3"}),
        ("a.csv", "x;load, MW\n1,2,3;2, or 3\n", {"x": "1,2,3", "load, MW": "2, or 3"}),
        ("a.csv", "sep=;\r\nx;y\r\n1;2\r\n", {"x": "1", "y": "2"}),
        ("a.csv", "x|y\n1|2\n", {"x": "1", "y": "2"}),
        ("a.csv", 'x,y|z|w\n"1,5",2\n', {"x": "1,5", "y|z|w": "2"}),
        ("a.csv", '"a;b;c",y\n1,2\n', {"a;b;c": "1", "y": "2"}),
    ],
)
def test_the_separator_is_found_in_the_header(
    name: str, content: str, expected: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content.encode())
    assert read(tmp_path / name, None) == [expected]
    assert sample_records(tmp_path / name).records == (expected,)


def test_a_bad_row_between_semicolons_spoils_only_itself(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('x;y\n1;2\n"a"b;3\n4,5;6\n')
    (part,) = cut_records([tmp_path / "a.csv"], None)
    first, bad, last = read_rows(part)
    assert first.record == {"x": "1", "y": "2"} and bad.problem and last.record == {"x": "4,5", "y": "6"}


def test_only_the_requested_columns_are_read(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), tmp_path / "a.parquet")
    (part,) = cut_records([tmp_path / "a.parquet"], None)
    assert [row.record for row in read_rows(part, ["label", "more"])] == [{"label": x["label"]} for x in RECORDS]
    assert [row.record for row in read_rows(part, ["more"])] == [{}] * len(RECORDS)
    assert part.row_number(6) == 7


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{\n", "the line is not JSON (Expecting property name"),
        (b'{"a": "\xff"}\n', "byte 8 of the line is not UTF-8"),
        (b"[1, 2]\n", "the line is not a JSON object but [1, 2]"),
        (b"[" * 100_000, "the JSON of the line can't be read"),
        (b'{"a": ' + b"9" * 5000 + b"}\n", "the JSON of the line can't be read"),
    ],
)
def test_only_a_line_that_is_not_a_record_has_a_problem(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n\n' + content + (b"" if content.endswith(b"\n") else b"\n") + b'{"a": 2}')
    (part,) = cut_records([path], None)
    first, bad, last = read_rows(part)
    assert first.record == {"a": 1} and last.record == {"a": 2} and not first.problem and not last.problem
    assert bad.problem.startswith(problem) and part.row_number(bad.row_index) == 3


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"1\n", "its number of cells is 1, not 2 as in the header"),
        (b"1,2,3\n", "its number of cells is 3, not 2 as in the header"),
        (b"1,\xff\n", "the cell in column 'b' is not UTF-8"),
        (b'1,"x"y\n', "the row can't be read ("),
    ],
)
def test_a_bad_csv_row_has_a_problem(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"a,b\n1,2\n" + content + b"3,4\n")
    (part,) = cut_records([path], None)
    rows = list(read_rows(part))
    assert rows[0].record == {"a": "1", "b": "2"} and rows[-1].record == {"a": "3", "b": "4"}
    assert rows[1].problem.startswith(problem) and part.row_number(rows[1].row_index) == 2


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (
            "a.txt",
            b"x",
            r"a\.txt: its suffix '\.txt' is not one of \.jsonl, \.ndjson, \.csv, \.tsv, \.parquet",
        ),
        ("a.jsonl", b"", r"a\.jsonl is empty; leave it out"),
        ("a.csv", b"a,b\n", r"a\.csv has a header but no rows; leave it out"),
        ("a.csv", b"1,2\n3,4\n", "its first line is blank or has only numbers and times; write the column names"),
        ("a.csv", b",b\n3,4\n", "the column name '' is empty, repeated or not UTF-8; rename it"),
        ("a.csv", b'a,b\n1,2\n3,"4\n5,6\n', r"a\.csv, row 2: a quote is opened in this row and never closed; fix"),
        ("a.csv", b"b,b\n3,4\n", "the column name 'b' is empty, repeated"),
        ("a.parquet", b"PAR1 or not", r"a\.parquet can't be read \(.*\); copy or write it again"),
    ],
)
def test_an_unreadable_file_is_an_error(name: str, content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=reason):
        read(tmp_path / name, None)


def test_a_header_line_may_end_with_a_separator_if_that_column_is_empty(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a;b;\n1;2;\n3;4\n")
    assert read(tmp_path / "a.csv", None) == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert sample_records(tmp_path / "a.csv").field_names == ("a", "b")
    (tmp_path / "b.csv").write_text("a;b;\n1;2;\n3;4;5\n6\n7;8;;\n")
    rows = [row for part in cut_records([tmp_path / "b.csv"], None) for row in read_rows(part)]
    assert [row.problem for row in rows] == [
        "",
        'its last cell is "5", but the header has no name for it',
        "its number of cells is 1, not 2 as in the header",
        "",
    ]
    (tmp_path / "c.csv").write_text("a;;\n1;;\n")
    with pytest.raises(DataError, match="the column name '' is empty"):
        read(tmp_path / "c.csv", None)


def test_a_folder_that_is_not_a_dataset_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a folder, but not a saved Hugging Face dataset"):
        cut_records([tmp_path], None)
    with pytest.raises(DataError, match="missing is not a file"):
        cut_records([tmp_path / "missing"], None)
    (tmp_path / "dataset_dict.json").touch()
    with pytest.raises(DataError, match="holds several datasets; use the folder of one of them"):
        cut_records([tmp_path], None)
    with pytest.raises(DataError, match="there are no files"):
        list_paths([])


def test_parquet_without_rows_is_an_error(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"a": []}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="has no rows"):
        cut_records([tmp_path / "a.parquet"], None)


@pytest.mark.parametrize(("module", "extra"), [("pyarrow", "parquet"), ("datasets", "datasets")])
def test_the_error_names_a_missing_library_and_how_to_install_it(
    module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.parquet" if extra == "parquet" else tmp_path
    (tmp_path / "a.parquet").write_text("x")
    (tmp_path / "state.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet" if extra == "parquet" else module, None)
    with pytest.raises(DataError, match=rf"needs {module}; pip install 'stretto\[{extra}\]' \(in a clone: .*\)$"):
        cut_records([path], None)


def test_a_line_that_is_too_long_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"a": 1}\n')
        file.seek(MAX_READ_BYTES, os.SEEK_CUR)  # a hole in the file: one long line of zeros
        file.write(b'\n{"a": 2}\n')
    for part_bytes in (None, 1):
        rows = [row for part in cut_records([path], part_bytes) for row in read_rows(part)]
        assert [row.record for row in rows] == [{"a": 1}, {}, {"a": 2}]
        assert rows[1].problem == "the line is longer than 128 MiB"


@pytest.mark.parametrize(
    "content", [b"1,2\n3," + b"4" * 1000 + b"\n5,6\n", b'1,2\n3,"' + b"4\n" * 1000 + b'"\n5,6\n'], ids=["line", "cell"]
)
def test_a_csv_line_or_cell_that_is_too_long_is_an_error(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.csv").write_bytes(b"a,b\n" + content)
    assert read(tmp_path / "a.csv", None)[-1] == {"a": "5", "b": "6"}
    monkeypatch.setattr(csv_cells, "MAX_READ_BYTES", 900)
    with pytest.raises(
        DataError, match=r"a\.csv, row 2: a line or cell is longer than .* MiB, or a quote is open; fix"
    ):
        read(tmp_path / "a.csv", None)


def test_a_csv_header_that_is_too_long_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_bytes(b"a," + b"b" * 1000 + b"\n1,2\n")
    monkeypatch.setattr(csv_cells, "MAX_READ_BYTES", 900)
    with pytest.raises(DataError, match=r"its header line can't be read \(the line is longer than 128 MiB\); fix it"):
        read(tmp_path / "a.csv", None)


def test_a_parquet_row_that_is_too_large_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": "a" * 600}, {"text": "b" * 700}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    monkeypatch.setattr(records, "MAX_READ_BYTES", 800)
    assert read(tmp_path / "a.parquet", None) == rows
    monkeypatch.setattr(records, "MAX_READ_BYTES", 650)
    with pytest.raises(DataError, match=r"a\.parquet has a row of more than .*; split it into several rows"):
        read(tmp_path / "a.parquet", None)


@pytest.mark.parametrize("is_link", [True, False])
def test_a_dataset_can_not_name_a_file_outside_its_folder(is_link: bool, tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    for name in ("own", "private"):
        datasets.Dataset.from_list(RECORDS).save_to_disk(tmp_path / name)
    (file,) = (tmp_path / "own").glob("*.arrow")
    file.unlink()
    if is_link:
        file.symlink_to(tmp_path / "private" / file.name)
    else:
        state = json.loads((tmp_path / "own" / "state.json").read_text())
        state["_data_files"] = [{"filename": f"../private/{file.name}"}]
        (tmp_path / "own" / "state.json").write_text(json.dumps(state))
    with pytest.raises(
        DataError, match=r"own: state\.json lists '.*arrow', which is outside the folder; don't trust it"
    ):
        read(tmp_path / "own", None)
