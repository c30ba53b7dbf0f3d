"""Numbers with a decimal comma in CSV files: which cells they are, and which are ambiguous."""

from pathlib import Path

import pytest

from stretto.data import SeriesOptions, prepare_series
from stretto.errors import DataError
from stretto.prepare.record_parser import parse_number
from stretto.prepare.records import cut_records, read_rows


def numbers(folder: Path, separator: str, *cells: str) -> list[float | None]:
    path = folder / "a.csv"
    path.write_text(f"t{separator}load\n" + "".join(f"1{separator}{cell}\n" for cell in cells))
    (part,) = cut_records([path], None)
    return [parse_number(row.record["load"], is_csv=True) for row in read_rows(part)]


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_a_comma_separates_decimals_unless_it_separates_columns(separator: str, tmp_path: Path) -> None:
    cells, expected = ("1,5", ",5", "-1.234,5", "0,125", "2.5", "7", "a,5"), [1.5, 0.5, -1234.5, 0.125, 2.5, 7, None]
    assert numbers(tmp_path, separator, *cells) == expected
    # Between tabs, the comma of 1,234 may separate thousands.
    assert numbers(tmp_path, separator, "1,234") == [1.234 if separator == ";" else None]


@pytest.mark.parametrize("cells", [("1.234", "1.234,5", "999,5"), ("999,5", "1.234"), ("-1.234.567", "0,5")])
def test_a_point_that_may_separate_thousands_is_refused(cells: tuple[str, ...], tmp_path: Path) -> None:
    problem = r"a\.csv: column 2 has .*,5 and .*\.\d\d\d, whose point could separate thousands or decimals; write its"
    with pytest.raises(DataError, match=problem):
        numbers(tmp_path, ";", *cells)
    assert numbers(tmp_path, ";", "1.234", "0.5") == [1.234, 0.5]


def test_names_keep_their_commas(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("unit;state;load\n" + "3,14;1,0;0,5\n" * 2 + "2,7;2,0;1,5\n")
    options = SeriesOptions(columns="load", by="unit", targets="state", target_kind="class_per_step")
    (store,) = prepare_series(tmp_path / "a.csv", tmp_path / "out", options)
    assert store.fields.targets is not None
    assert store.fields.targets.names == ("1,0", "2,0")
    assert sorted(steps.tolist() for steps in store.read(store.step_ranges([(0, 0), (0, 1)]))) == [
        [[0.5], [0.5]],
        [[1.5]],
    ]
