"""SeriesSchema: which columns of a table hold the time, the name of a series, and its channels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.base.errors import DataError
from stretto.base.task import TargetKind
from stretto.prepare.field_summary import TIME_NAMES, FieldSummary
from stretto.prepare.file_listing import AmbiguousInputError
from stretto.prepare.hints import DataHints
from stretto.prepare.options import NanPolicy
from stretto.prepare.record_sample import RecordSample
from stretto.prepare.time_axis import (
    calendar_period,
    has_many_repeats,
    is_decreasing_anywhere,
    is_grouped,
    is_row_counter,
    median_interval,
    parse_timestamps,
)
from stretto.prepare.time_formats import ambiguous_format

# The usual names of a column that names the series of a row.
_BY_NAMES = ("id", "unique_id", "series", "series_id", "meter", "station", "sensor", "unit", "store", "item", "symbol")


@dataclass(frozen=True)
class SeriesSchema:
    """How a table is read as series."""

    columns: tuple[str, ...]  # the channels
    categories: tuple[str, ...] = ()  # those with few different texts or booleans, not numbers
    time: str | None = None  # column with the time of a row
    time_format: str | None = None  # how the times are written; None: ISO 8601, or numbers
    by: str | None = None  # column that names the series of a row
    seconds: float | None = None  # median time from one row to the next; None if unknown
    period: int = 0  # rows until values may repeat, such as 24 for hourly rows; 0 if unknown
    nan: NanPolicy = "error"
    has_missing: bool = False  # whether a channel has missing values
    known_future: tuple[str, ...] = ()  # channels whose values are known ahead of time
    static: tuple[str, ...] = ()  # channels that are constant within a series
    targets: tuple[str, ...] = ()  # columns to predict at each time step or per series; empty: a forecast
    target_kind: TargetKind | None = None  # None: a forecast

    @property
    def numbers(self) -> tuple[str, ...]:
        """The channels of numbers."""
        return tuple(name for name in self.columns if name not in self.categories)

    @property
    def target_fields(self) -> tuple[str, ...]:
        """The columns to predict at each time step or per series; empty if the future is predicted."""
        return self.targets


def infer_series_schema(sample: RecordSample, hints: DataHints) -> tuple[SeriesSchema, list[str]]:
    """Return how the table is read as series, and notes on what was inferred."""
    time = hints.time or _choose_time(sample)
    if time is None and sample.time_format is not None:
        problem = f"time_format={sample.time_format!r} matches no column of {sample.path}"
        raise DataError(f"{problem}; fix it, or name the column with time=COLUMN")
    time_format = None if time is None else _find_time_format(sample, time)
    by = hints.by or _choose_by(sample, time, time_format, hints.inputs)
    others = [field for field in sample.fields if field.name not in (time, by)]
    numbers = [field for field in others if field.type == "number"]
    channels = [field for field in others if field.type == "number" or _is_category(field, hints)]
    if not numbers and not (channels and hints.targets):
        excluded = " and ".join(name for name in (time, by) if name is not None)
        besides = f" besides {excluded}" if excluded else ""
        raise DataError(f"{sample.path} has no column of numbers{besides}; use different data")
    categories = tuple(field.name for field in channels if field not in numbers)
    others = [field for field in others if field not in channels]
    unparsed_time = next((field.name for field in others if field.may_be_unparsed_time), None)
    notes = [] if time else [_file_order_note(unparsed_time, sample.records)]
    notes += _column_notes(categories, [field for field in others if not field.may_be_unparsed_time], hints)
    with_nan = [field.name for field in numbers if field.has_nan]
    if with_nan:
        notes.append(f"NA, NaN or infinity in {', '.join(with_nan)}: read as missing values (nan=error rejects them)")
    first_series = [row for row in sample.records if by is None or row.get(by) == sample.records[0].get(by)]
    times = [] if time is None else parse_timestamps(first_series, time, sample.is_csv, time_format)
    seconds = median_interval(times)
    schema = SeriesSchema(
        columns=tuple(field.name for field in channels),
        categories=categories,
        time=time,
        time_format=time_format,
        by=by,
        seconds=seconds,
        period=calendar_period(seconds, len(first_series)),
        nan="missing" if with_nan else "error",
        has_missing=any(field.num_missing or field.has_nan for field in numbers),
    )
    return schema, notes


def _is_category(field: FieldSummary, hints: DataHints) -> bool:
    """Return whether a column holds categories: few different texts or booleans or, if it is named, any texts."""
    return field.could_be_categories and (field.type == "category" or field.name in hints.inputs)


def _column_notes(categories: Sequence[str], unused: Sequence[FieldSummary], hints: DataHints) -> list[str]:
    """Return notes on the columns that became categories, and on those that are left out; not if inputs are named."""
    if hints.inputs:
        return []
    notes = []
    if categories:
        notes.append(f"read as categories: {', '.join(categories)} (inputs=NAMES chooses the columns to read)")
    if unused:
        types = ((field.name, "texts and numbers" if field.has_number else field.type) for field in unused)
        names = ", ".join(f"{name} ({type})" for name, type in types)
        notes.append(f"ignored, since neither numbers nor few different texts: {names}")
    return notes


def _file_order_note(unparsed_time: str | None, records: Sequence[Mapping[str, Any]]) -> str:
    if unparsed_time is None:
        return "no column of times was found: rows are time steps in the order of the file (time=COLUMN names one)"
    example = next((record[unparsed_time] for record in records if record.get(unparsed_time)), "")
    return (
        f"times in {unparsed_time!r} ({example}) can't be parsed: rows are time steps in the order of the file "
        "(time_format=FORMAT says how times are written, season=N sets the seasonal period)"
    )


def _choose_time(sample: RecordSample) -> str | None:
    times = [field.name for field in sample.fields if field.type == "time" or field.time_formats]
    numbers = [field.name for field in sample.fields if field.type == "number"]
    if not times and sample.time_format is not None:
        return None
    if not times:
        usual = [name for name in numbers if name.lower() in TIME_NAMES]
        times = [
            name for name in usual if not is_decreasing_anywhere(parse_timestamps(sample.records, name, sample.is_csv))
        ]
    if not times:
        # The first column of numbers, if it only counts the rows.
        return next((name for name in numbers[:1] if is_row_counter(sample.records, name, sample.is_csv)), None)
    usual = [name for name in times if name.lower() in TIME_NAMES]
    if not usual and len(times) > 1:
        raise AmbiguousInputError(
            f"{sample.path} has several columns of times ({', '.join(times)}); choose one with time=COLUMN",
            "time",
            "Which column is the time of a row?",
            times,
        )
    return (usual or times)[0]


def _find_time_format(sample: RecordSample, time: str) -> str | None:
    """Return how the times in a column are written; None for ISO 8601 and numbers."""
    formats = next((field.time_formats for field in sample.fields if field.name == time), ())
    example = next((record[time] for record in sample.records if record.get(time)), "")
    if len(formats) > 1:
        raise AmbiguousInputError(
            ambiguous_format(sample.path, time, example, formats),
            "time_format",
            f"How are the dates in {time!r}, such as {example}, written?",
            formats,
        )
    given = sample.time_format
    if given is not None and not parse_timestamps(sample.records, time, sample.is_csv, given):
        raise DataError(f"time_format={given!r} does not match {time!r} ({example}) in {sample.path}; fix it")
    return given or next(iter(formats), None)


def _choose_by(sample: RecordSample, time: str | None, time_format: str | None, inputs: Sequence[str]) -> str | None:
    """Return the column that names the series of a row, or None if all rows are one series; it is no input."""
    candidates, mixed = (
        [name for name in names if name not in inputs] for names in _list_series_columns(sample, time, time_format)
    )
    if mixed and not candidates:
        raise DataError(
            f"{sample.path}: rows of different series are mixed; sort them by {mixed[0]!r}, then by {time!r}, "
            "or choose a different column with by=COLUMN"
        )
    usual = [name for name in candidates if name.lower() in _BY_NAMES]
    if len(candidates) > 1 and len(usual) != 1:
        raise AmbiguousInputError(
            f"{sample.path} has several columns that could name the series ({', '.join(candidates)}); choose one with "
            "by=COLUMN",
            "by",
            "Which column names the series of a row?",
            candidates,
        )
    return next(iter(usual or candidates), None)


def _list_series_columns(
    sample: RecordSample, time: str | None, time_format: str | None
) -> tuple[list[str], list[str]]:
    """Return the columns that could name the series: those whose series are contiguous, and those whose series mix."""
    records = sample.records
    times = [] if time is None else parse_timestamps(records, time, sample.is_csv, time_format)
    # With several series, time jumps back where the next one starts, or repeats if their rows are mixed.
    has_several = is_decreasing_anywhere(times) or has_many_repeats(times)
    named = [field for field in sample.fields if field.type in ("category", "text") or field.name.lower() in _BY_NAMES]
    named = [field for field in named if not field.may_be_unparsed_time]
    integers = [field for field in sample.fields if has_several and field.is_integer and field not in named]
    grouped: list[str] = []
    mixed: list[str] = []
    for fields in (named, integers):
        # An integer column can name the series too, but only if no other column does.
        if grouped or mixed:
            break
        for field in fields:
            num_distinct = len({str(record.get(field.name)) for record in (*records, *sample.last_records)})
            if field.name == time or not 1 < num_distinct <= len(records) / 2:
                continue
            if is_grouped(records, field.name):
                grouped.append(field.name)
            elif (
                time is not None
                and has_several
                and field in named
                and _separates_series(sample, field.name, time, time_format)
            ):
                mixed.append(field.name)
    return grouped, mixed


def _separates_series(sample: RecordSample, by: str, time: str, time_format: str | None) -> bool:
    """Return whether time neither decreases nor often repeats among the rows with the same value in column `by`."""
    for value in {str(record.get(by)) for record in sample.records}:
        rows = [record for record in sample.records if str(record.get(by)) == value]
        times = parse_timestamps(rows, time, sample.is_csv, time_format)
        if is_decreasing_anywhere(times) or has_many_repeats(times):
            return False
    return True
