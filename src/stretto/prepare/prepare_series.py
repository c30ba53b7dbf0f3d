"""prepare_series: turns tables into a store of series; each row is one time step."""

import math
from array import array
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import DataError
from stretto.prepare.categories import OnNote, find_categories, log_note, shared_codes
from stretto.prepare.category_codes import Codes, to_code
from stretto.prepare.downloads import urls_in_errors
from stretto.prepare.field_check import check_fields
from stretto.prepare.options import BadRowPolicy, NanPolicy, SeriesOptions, open_like
from stretto.prepare.part_runner import PartResult
from stretto.prepare.prepare_job import Job, OnProgress, Workers, open_job
from stretto.prepare.record_parser import FLOAT32_MAX, parse_number, to_number
from stretto.prepare.record_spool import Files, Records, are_records, spool_records
from stretto.prepare.records import RecordPart, cut_records, list_paths, read_rows, shorten
from stretto.prepare.row_reader import BadRowError, OnSkipped, RowReader, SkippedRows, log_skipped_rows, missing_field
from stretto.prepare.series_columns import MAX_ROWS_SAMPLED, SeriesColumns, choose_columns
from stretto.prepare.series_targets import SeriesTargets, StepTargets, make_series_targets
from stretto.prepare.shard_writer import (
    Shards,
    finish_part,
    make_channels,
    note_unknown,
    open_shards,
    write_parts,
    write_store,
)
from stretto.prepare.time_formats import ambiguous_format, find_time_formats, parse_time
from stretto.prepare.work_folder import WorkFolder, join_location
from stretto.store.sequences import CHANNEL_DTYPE, Channels, Origin, Sequences, SharedProperties

Timestamp = float | datetime

_COLUMN_OPTIONS = ("columns", "known_future", "static", "targets")


@urls_in_errors()
def prepare_series(
    files: Files | Records,
    folder: Path | str,
    options: SeriesOptions = SeriesOptions(),
    *,
    workers: int | None = None,
    executor: Workers = None,
    on_progress: OnProgress = lambda progress: None,
    on_skipped: OnSkipped = log_skipped_rows,
    on_note: OnNote = log_note,
) -> list[Sequences]:
    """Write the rows of files, of saved Hugging Face datasets, or of Python, as series to `folder`.

    Files are CSV, Parquet or JSONL. Each row is one time step. A file is one series; with `by`, consecutive rows with
    the same value in that column are one. The channels are `columns`, by default all whose first value in the first
    file is a number, and those of booleans or few different texts, except `by`, `time` and `targets`. Texts become
    categories: at most 1,000, stored as codes. In place of files, give an iterable of dicts, one per row, which is read
    once.

    With `targets`, a model predicts these columns at each time step, from the channels up to it, instead of a forecast:
    a class (text, integers or booleans) or values. If `target_kind` is per row, the last time step of a series counts,
    and validation takes whole series.

    `time` must not decrease within a series. With `validation_fraction`, the end of each series goes to
    `folder/valid` and the rest to `folder/train`, from which the statistics are computed. With `like`, columns and
    statistics come from that data. `known_future` and `static` name the channels that a forecast knows ahead of time.
    `static` may name `by`, which is then a category. `on_note` is called with what you may want to know: the columns
    that are left out, and how many texts are not among the categories of `like`. `workers` and `executor` say who
    writes the parts, as in `prepare_text`.
    """
    if are_records(files):
        with spool_records(files, folder, executor) as path:
            return _prepare_files(
                list_paths(path), folder, options, workers, executor, on_progress, on_skipped, on_note
            )
    paths = list_paths(cast("Files", files), is_local=executor is None)
    return _prepare_files(paths, folder, options, workers, executor, on_progress, on_skipped, on_note)


def _prepare_files(
    paths: list[Path],
    folder: Path | str,
    options: SeriesOptions,
    workers: int | None,
    executor: Workers,
    on_progress: OnProgress,
    on_skipped: OnSkipped,
    on_note: OnNote,
) -> list[Sequences]:
    parts = cut_records(paths, None)
    shared = open_like(options.like)
    channels = None if shared is None else _shared_channels(shared, options)
    if options.bad_rows == "error":
        names = [(option, name) for option in _COLUMN_OPTIONS for name in getattr(options, option) or ()]
        check_fields(parts, [*names, ("by", options.by), ("time", options.time)])
    columns = choose_columns(parts[0], options) if channels is None else SeriesColumns(channels.names)
    static = tuple(options.static) if channels is None else channels.static
    parser = _StepParser(
        _check_columns(columns.names, options, static),
        options.by,
        options.time,
        options.nan,
        static=static,
        time_format=options.time_format or _find_time_format(parts[0], options.time),
        targets=make_series_targets(parts, options, shared),
        categories={} if channels is None else shared_codes(channels),
    )
    splits = _splits(options)
    with open_job(folder, paths, options.to_dict(), workers, on_progress, executor, splits) as job:
        if columns.categories:
            categories = find_categories(job, parts, columns.categories, options.bad_rows, has_lists=False)
            parser = replace(parser, categories=categories)
        skipped, notes = _write(job, parts, parser, options, shared)
    for note in notes:
        on_note(note)
    if columns.ignored:
        on_note(f"ignored, since neither numbers nor few different texts: {', '.join(columns.ignored)}")
    if skipped.num_rows:
        on_skipped(skipped)
    return [Sequences.open(join_location(folder, split)) for split in splits]


def _splits(options: SeriesOptions) -> tuple[str, ...]:
    return ("train", "valid") if options.validation_fraction else ("",)


def _write(
    job: Job,
    parts: Sequence[RecordPart],
    parser: "_StepParser",
    options: SeriesOptions,
    shared: SharedProperties | None,
) -> tuple[SkippedRows, list[str]]:
    if parser.targets is not None:
        parser = replace(parser, targets=parser.targets.find_classes(job, parts, options))
    splits = _splits(options)
    task = _WriteSeries(parser, splits, options.validation_fraction, options.bad_rows)
    write_stores = partial(_write_stores, job, parser, options, shared)
    return write_parts(job, task, parts, splits, options, write_stores)


def _write_stores(
    job: Job,
    parser: "_StepParser",
    options: SeriesOptions,
    shared: SharedProperties | None,
    shards: Shards,
    on_note: OnNote,
) -> None:
    splits, targets = _splits(options), parser.targets
    like = shared.values if shared is not None and isinstance(shared.values, Channels) else None
    channels = make_channels(parser.columns, shards[splits[0]], like, parser.categories)
    note_unknown(parser.columns, shards, parser.categories, on_note)
    known_future = tuple(options.known_future) if like is None else like.known_future
    channels = channels.model_copy(update={"known_future": known_future, "static": parser.static})
    stored_targets = None if targets is None else targets.describe(shards[splits[0]], shared)
    target_columns = () if targets is None else targets.columns
    origin = Origin(by=parser.by, time=parser.time, time_format=parser.time_format, targets=target_columns)
    for split in splits:
        write_store(job, split, shards[split], channels, stored_targets, origin=origin)


def _shared_channels(shared: SharedProperties, options: SeriesOptions) -> Channels:
    values = shared.values
    if not isinstance(values, Channels):
        raise DataError(f"like={shared.location} has {values.type}, not channels; use different data")
    expected = {"columns": values.names, "known_future": values.known_future, "static": values.static}
    for option, names in expected.items():
        given = getattr(options, option)
        if given and tuple(given) != names:
            problem = f"like={shared.location} has {option}={','.join(names) or 'none'}, not {','.join(given)}"
            raise DataError(f"{problem}; leave one of the two options out")
    return values


def _check_columns(columns: Sequence[str], options: SeriesOptions, static: Sequence[str]) -> tuple[str, ...]:
    listed = ",".join(columns)
    by_in_static = {options.by} & {*static}  # the name of a series can be an input
    if not columns:
        raise DataError("columns=() is empty; name at least one column")
    for name in columns:
        if list(columns).count(name) > 1:
            raise DataError(f"columns={listed} names {name!r} more than once; name each column once")
        if name in (options.by, options.time, *(options.targets or ())) and name not in by_in_static:
            role = "by" if name == options.by else "time" if name == options.time else "targets"
            raise DataError(f"columns={listed} includes {role}={name}; leave it out of the columns")
        if name in options.known_future and name in options.static:
            raise DataError(f"known_future and static both name {name!r}; name it in one of them")
    return tuple(columns)


def _find_time_format(part: RecordPart, time: str | None) -> str | None:
    """Return how the times of a file's first rows are written; None for ISO 8601 and numbers."""
    if time is None:
        return None
    values = [row.record.get(time) for row in islice(read_rows(part, [time]), MAX_ROWS_SAMPLED)]
    texts = [value for value in values if isinstance(value, str) and value.strip()]
    if not texts or parse_timestamp(texts[0], part.format == "csv") is not None:
        return None
    formats = find_time_formats(texts)
    if len(formats) > 1:
        raise DataError(ambiguous_format(part.path, time, texts[0], formats))
    return next(iter(formats), None)


@dataclass(frozen=True)
class _StepParser:
    """Parses a row into one time step of a series."""

    columns: tuple[str, ...]
    by: str | None
    time: str | None
    nan: NanPolicy
    static: tuple[str, ...] = ()  # columns that are constant within a series
    time_format: str | None = None
    targets: SeriesTargets | None = None
    categories: Mapping[str, Codes] = field(default_factory=dict)  # the codes of columns that hold categories

    @property
    def fields(self) -> list[str]:
        names = (*self.columns, self.by, self.time, *(() if self.targets is None else self.targets.columns))
        return list(dict.fromkeys(name for name in names if name is not None))

    def parse(
        self, record: Mapping[str, Any], is_csv: bool
    ) -> tuple[list[float], Hashable, Timestamp | None, StepTargets]:
        """Return the values of a row, the name of its series, its time, and its targets."""
        targets = None if self.targets is None else self.targets.parse(record, is_csv)
        return self._values(record, is_csv), self._series_name(record), self._timestamp(record, is_csv), targets

    def _values(self, record: Mapping[str, Any], is_csv: bool) -> list[float]:
        for name in self.columns:
            if name not in record:
                raise missing_field(record, name)
        return [self._value(record[name], name, is_csv) for name in self.columns]

    def _value(self, value: object, name: str, is_csv: bool) -> float:
        codes = self.categories.get(name)
        return to_number(value, name, self.nan, is_csv) if codes is None else to_code(value, name, codes)

    def _series_name(self, record: Mapping[str, Any]) -> Hashable:
        if self.by is None:
            return None
        value = record.get(self.by)
        # NaN can't name a series: it differs even from itself.
        if value is None or value == "" or value != value:
            raise missing_field(record, self.by)
        if not isinstance(value, Hashable):
            raise BadRowError(f"{self.by!r} is {shorten(value)}, which can't be the name of a series")
        return value

    def _timestamp(self, record: Mapping[str, Any], is_csv: bool) -> Timestamp | None:
        if self.time is None:
            return None
        value = record.get(self.time)
        if value is None or value == "":
            raise missing_field(record, self.time)
        timestamp = parse_timestamp(value, is_csv, self.time_format)
        if timestamp is None and self.time_format is not None:
            raise BadRowError(f"{self.time!r} is {shorten(value)}, not a time in time_format={self.time_format!r}")
        if timestamp is None:
            problem = f"{self.time!r} is {shorten(value)}, neither a number nor a time such as 2025-01-31T12:00:00"
            raise BadRowError(problem, "fix it, say how times are written with time_format=FORMAT")
        return timestamp


def parse_timestamp(value: object, is_csv: bool, time_format: str | None = None) -> Timestamp | None:
    """Return a value as a time, which is a datetime or a number; None if it is neither."""
    if time_format is not None and isinstance(value, str | int):
        return parse_time(str(value), time_format)
    if isinstance(value, datetime):
        return value
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day)
    number = parse_number(value, is_csv)
    if number is not None:
        # Not a time: NaN, infinity, or an integer too large for any float (`parse_number` returns 2 * FLOAT32_MAX).
        return number if abs(number) <= FLOAT32_MAX else None
    return parse_time(value) if isinstance(value, str) else None


@dataclass(frozen=True)
class _WriteSeries:
    """Writes the series of a file; the end of each goes to the validation split, if there is one."""

    parser: _StepParser
    splits: tuple[str, ...]  # train and valid, or a single one without a name
    validation_fraction: float
    bad_rows: BadRowPolicy = field(repr=False)  # see `allows`

    def __call__(self, part: RecordPart, number: int, folder: WorkFolder, /) -> PartResult:
        reader = RowReader(part, self.bad_rows)
        targets = self.parser.targets
        with open_shards(
            folder, self.splits, number, CHANNEL_DTYPE, None if targets is None else targets.dtype
        ) as writers:
            for index, (steps, step_targets) in enumerate(self._series(reader)):
                encoded = None if targets is None else targets.encode(step_targets)
                if targets is not None and targets.is_per_series:
                    writers[self._choose_split(index)].append(steps, encoded)
                    continue
                num_training = len(steps) - int(len(steps) * self.validation_fraction)
                for split, part_steps in zip(
                    self.splits, (slice(num_training), slice(num_training, None)), strict=False
                ):
                    if len(steps[part_steps]):
                        writers[split].append(steps[part_steps], None if encoded is None else encoded[part_steps])
            return finish_part(writers, reader)

    def _choose_split(self, index: int) -> str:
        """Return the split of a whole series: evenly spread ones are for validation."""
        is_validation = int((index + 1) * self.validation_fraction) > int(index * self.validation_fraction)
        return self.splits[-1] if is_validation else self.splits[0]

    def _series(self, reader: RowReader) -> Iterator[tuple[NDArray[np.float64], list[StepTargets]]]:
        """Yield the series one by one; only the current one and the names of those before it are in memory."""
        part, parser = reader.part, self.parser
        values: array[float] = array("d")  # all steps of the current series, concatenated
        targets: list[StepTargets] = []
        current_name, previous_time = None, None
        ended_names: set[Hashable] = set()
        rows = reader.read(lambda record: parser.parse(record, part.format == "csv"), parser.fields)
        for row_index, (step, name, timestamp, step_targets) in rows:
            has_current_ended = len(values) > 0 and name != current_name
            error = None if has_current_ended else _find_order_error(previous_time, timestamp, parser.time)
            if error is not None:
                reader.reject(row_index, error)
                continue
            if has_current_ended:
                yield self._steps(values, part, current_name), targets
                values, targets = array("d"), []
                ended_names.add(current_name)
            if name in ended_names:
                where = f"{part.path}, row {part.row_number(row_index):,}"
                problem = f"{parser.by!r} is {shorten(name)}, but the series of that name ended in a row above"
                # A stable sort keeps the order in time within a series, also that of times which are text.
                remedy = f"sort the rows by {parser.by!r} first (pandas: df.sort_values({parser.by!r}, kind='stable'))"
                raise DataError(f"{where}: {problem}; {remedy}")
            current_name, previous_time = name, timestamp
            values.extend(step)
            targets.append(step_targets)
        if values:
            yield self._steps(values, part, current_name), targets

    def _steps(self, values: "array[float]", part: RecordPart, name: Hashable) -> NDArray[np.float64]:
        """Return the time steps of a series `[time, columns]`; a static value is filled in where it is missing."""
        steps = np.array(values, np.float64).reshape(-1, len(self.parser.columns))
        for column in self.parser.static:
            index = self.parser.columns.index(column)
            distinct = np.unique(steps[:, index][~np.isnan(steps[:, index])])
            if len(distinct) > 1:
                series = "a series" if name is None else f"the series {shorten(name)}"
                first, second = (self._text(column, value) for value in distinct[:2])
                problem = f"static={column} is both {first} and {second} in {series}"
                by = "name them with by=COLUMN" if self.parser.by is None else f"check by={self.parser.by}"
                raise DataError(f"{part.path}: {problem}; leave it out of static or, if these are several series, {by}")
            steps[:, index] = distinct[0] if len(distinct) else math.nan
        return steps

    def _text(self, column: str, value: float) -> str:
        """Return a value of a column for a message: a number, or the name of a category."""
        names = [*self.parser.categories.get(column, ())]
        return f"{value:g}" if not names else shorten(names[int(value) - 1]) if value else "unknown"


def _find_order_error(previous: Timestamp | None, timestamp: Timestamp | None, name: str | None) -> BadRowError | None:
    """Return the error for a row whose time is before that of the row above or can't be compared with it, or None."""
    if previous is None or timestamp is None:
        return None
    try:
        # A date can't be compared with a number, nor a time that has a zone with one that has none.
        is_before = timestamp < previous  # type: ignore[operator]
    except TypeError:
        return BadRowError(f"{name!r} is {timestamp}, which can't be compared with {previous} in the row above")
    problem = f"{name!r} is {timestamp}, which is before {previous} in the row above"
    return BadRowError(problem, "sort the rows by time") if is_before else None
