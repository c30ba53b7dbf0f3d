"""Times as people write them: found out where that is safe, asked for where it is not."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.data import DataHints, SeriesOptions, SeriesSchema, inspect_data, prepare_data, prepare_series
from stretto.errors import AmbiguousInputError, DataError
from stretto.prepare.time_formats import find_time_formats, parse_time

START = datetime(2025, 1, 1, 10)


def write_table(path: Path, texts: Iterable[str]) -> Path:
    path.write_text("when;load\n" + "".join(f"{text};{row % 7}\n" for row, text in enumerate(texts)))
    return path


def written(time_format: str, num_rows: int = 90, **step: int) -> list[str]:
    step = step or {"hours": 13}
    return [(START + row * timedelta(**step)).strftime(time_format) for row in range(num_rows)]


@pytest.mark.parametrize(
    "time_format",
    [
        "%d.%m.%Y",
        "%d.%m.%Y %H:%M",
        "%d/%m/%Y %H:%M:%S",
        "%m/%d/%Y %I:%M %p",
        "%m-%d-%Y, %H:%M",
        "%d-%m-%YT%H:%M:%S.%f",
        "%Y/%m/%d",
        "%Y-%m-%d %I:%M:%S %p",
    ],
)
def test_a_date_in_numbers_is_recognized(time_format: str, tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.csv", written(time_format))
    schema = inspect_data(path).schema
    assert isinstance(schema, SeriesSchema)
    assert (schema.time, schema.time_format, schema.columns) == ("when", time_format, ("load",))
    train = prepare_data(inspect_data(path), tmp_path / "data").train
    (stored,) = prepare_series(path, tmp_path / "again", SeriesOptions(time="when"))
    for store in (train, stored):
        assert store.fields.origin is not None and store.fields.origin.time_format == time_format  # type: ignore[union-attr]


@given(st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31)))
def test_a_time_is_what_was_written(moment: datetime) -> None:
    moment = moment.replace(microsecond=0)
    text = f"{moment.day}.{moment.month:02}.{moment.year:04} {moment.hour}:{moment.minute:02}:{moment.second:02}"
    (time_format,) = find_time_formats([text])
    assert parse_time(f" {text} ", time_format) == moment


def test_the_first_number_above_twelve_tells_the_day_from_the_month() -> None:
    assert find_time_formats(["01/02/2025", "13/02/2025"]) == ("%d/%m/%Y",)
    assert find_time_formats(["01/02/2025", "02/13/2025"]) == ("%m/%d/%Y",)
    assert find_time_formats(["01/02/2025", "02/03/2025"]) == ("%d/%m/%Y", "%m/%d/%Y")
    assert find_time_formats(["13/02/2025", "02/13/2025"]) == ()
    assert find_time_formats(["01/02/25"]) == find_time_formats(["1.5"]) == find_time_formats([]) == ()


def test_dates_that_could_be_read_in_two_ways_are_asked_for(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.csv", written("%d/%m/%Y %H:%M", 60, hours=1))
    problem = (
        r"in the dates of 'when', such as 01/01/2025 10:00, the day or the month could be first; "
        r"set time_format='%d/%m/%Y %H:%M' or time_format='%m/%d/%Y %H:%M'$"
    )
    with pytest.raises(AmbiguousInputError, match=problem) as caught:
        inspect_data(path)
    assert caught.value.hint == "time_format" and caught.value.choices == ("%d/%m/%Y %H:%M", "%m/%d/%Y %H:%M")
    with pytest.raises(DataError, match=problem):
        prepare_series(path, tmp_path / "data", SeriesOptions(time="when"))
    schema = inspect_data(path, DataHints(time_format="%d/%m/%Y %H:%M")).schema
    assert isinstance(schema, SeriesSchema)
    assert (schema.time, schema.time_format, schema.seconds) == ("when", "%d/%m/%Y %H:%M", 3600)


@pytest.mark.parametrize("time_format", ["%d %B %y", "%Y%m%d", "%b-%Y"])
def test_any_format_can_be_named(time_format: str, tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.csv", written(time_format, 30, days=31))
    schema = inspect_data(path, DataHints(time="when", time_format=time_format)).schema
    assert isinstance(schema, SeriesSchema) and (schema.time, schema.time_format) == ("when", time_format)
    assert schema.seconds is not None and schema.seconds > 27 * 86400
    options = SeriesOptions(time="when", time_format=time_format)
    (stored,) = prepare_series(path, tmp_path / "data", options)
    assert stored.num_steps == 30


def test_days_before_months_must_not_decrease(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.csv", ["30.01.2025", "31.01.2025", "01.02.2025", "31.01.2025"])
    with pytest.raises(DataError, match=r"row 4: 'when' is 2025-01-31 .* before 2025-02-01 .*; sort the rows by time"):
        prepare_series(path, tmp_path / "data", SeriesOptions(time="when"))


@pytest.mark.parametrize(
    ("texts", "options", "problem"),
    [
        (
            ["31.12.2025", "32.12.2025"],
            {"time_format": "%d.%m.%Y"},
            r"row 2: 'when' is \"32.12.2025\", not a time in time",
        ),
        (
            ["1960Q1", "1960Q2"],
            {},
            "neither a number nor a time such as .*; fix it, say how times are written with time_fo",
        ),
    ],
)
def test_a_time_that_is_not_written_so_is_a_bad_row(
    texts: list[str], options: dict[str, str], problem: str, tmp_path: Path
) -> None:
    path = write_table(tmp_path / "a.csv", texts)
    with pytest.raises(DataError, match=problem):
        prepare_series(path, tmp_path / "data", SeriesOptions(time="when", **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("time_format", ["days", "%Q", "%d %d"])
def test_a_format_that_is_none_is_refused(time_format: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not valid \(.*\); use directives of Python's strptime, such as"):
        SeriesOptions(time="when", time_format=time_format)
    path = write_table(tmp_path / "a.csv", ["31.12.2025"] * 3)
    with pytest.raises(DataError, match="is not valid"):
        inspect_data(path, DataHints(time_format=time_format))
    with pytest.raises(DataError, match=r"time_format='%Y-%m' matches no column of .*; fix it, or name the column"):
        inspect_data(path, DataHints(time_format="%Y-%m"))
    with pytest.raises(DataError, match=r"time_format='%Y-%m' does not match 'when' \(31.12.2025\)"):
        inspect_data(path, DataHints(time="when", time_format="%Y-%m"))
