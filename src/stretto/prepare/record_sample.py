"""RecordSample: the first rows of a file of records and some of the last, to infer what the file contains."""

import io
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from stretto.base.errors import DataError
from stretto.prepare.compression import ExpandedFile, is_compressed, open_binary
from stretto.prepare.csv_cells import csv_cells, csv_reader, find_separator, read_header
from stretto.prepare.field_summary import FieldSummary, infer_fields
from stretto.prepare.npz_file import ArrayFile
from stretto.prepare.records import (
    BYTE_ORDER_MARK,
    ParsedRow,
    RecordPart,
    batch_records,
    csv_row,
    find_format,
    open_dataset,
    open_parquet,
    parse_line,
    read_rows,
    unreadable,
)

MAX_BYTES = 1 << 20  # at most this many bytes are read at the beginning of a text, JSONL or CSV file
_TAIL_BYTES = 64 << 10  # and at most this many at the end of a JSONL or CSV file
# A sample holds at most this many of a file's first rows, and this many of its last rows.
_MAX_ROWS, _TAIL_ROWS = 2000, 100
_MAX_ARRAY_BYTES = 8 << 20  # or, from a file of arrays, as many rows as have this many bytes

# The first rows, the last rows (empty if the first rows are the whole file), and the approximate number of all rows.
_SampledRows = tuple[list[ParsedRow], list[ParsedRow], int]


@dataclass(frozen=True)
class RecordSample:
    """Records from the beginning and the end of a file, and a summary of their fields."""

    path: Path
    is_csv: bool
    records: tuple[Mapping[str, Any], ...]  # from the beginning of the file; bad rows are left out
    last_records: tuple[Mapping[str, Any], ...]
    num_rows: int  # in the whole file, approximately
    time_format: str | None = None  # how times are written, if known

    @cached_property
    def fields(self) -> tuple[FieldSummary, ...]:
        """A summary of each field; the last rows count too, since a file may be sorted by class."""
        with_last = {field.name: field for field in self._infer([*self.records, *self.last_records])}
        # If the last rows change a field's type, ignore them: those of a CSV file may start within a quoted cell.
        return tuple(
            with_last[field.name] if with_last[field.name].type == field.type else field
            for field in self._infer(self.records)
        )

    def find(self, name: str) -> FieldSummary:
        """Return the summary of a field."""
        return next(field for field in self.fields if field.name == name)

    def _infer(self, records: Sequence[Mapping[str, Any]]) -> tuple[FieldSummary, ...]:
        return infer_fields(records, self.is_csv, self.time_format)

    @property
    def field_names(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.fields)


def sample_records(path: Path, time_format: str | None = None) -> RecordSample:
    """Read the beginning and the end of a file of records; `time_format` says how times are written, if known."""
    format = find_format(path)
    if format == "parquet":
        first, last, num_rows = _sample_parquet(path)
    elif format == "datasets":
        first, last, num_rows = _sample_dataset(path)
    elif format == "npz":
        first, last, num_rows = _sample_arrays(path)
    else:
        first, last, num_rows = _sample_lines(path, format == "csv")
    if not first:
        raise DataError(f"{path} has no rows; choose a different file")
    records, last_records = (tuple(row.record for row in rows if not row.problem) for rows in (first, last))
    if not records:
        raise DataError(f"{path}: none of its first rows can be read (the first: {first[0].problem}); fix the file")
    return RecordSample(path, format == "csv", records, last_records, num_rows, time_format)


class Beginning(NamedTuple):
    """Up to `MAX_BYTES` of a file's content, to the end of a line if there is one."""

    content: bytes
    is_complete: bool  # whether that is all
    num_bytes: int  # of all content; approximately, if the file is compressed


def read_beginning(path: Path) -> Beginning:
    """Read the beginning of a file."""
    try:
        with open_binary(path) as file:
            content = file.read(MAX_BYTES)
            num_bytes = path.stat().st_size
            if isinstance(file.raw, ExpandedFile):
                num_bytes = round(len(content) / file.raw.fraction_read)
            is_complete = not file.read(1)
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror}); choose a different file") from None
    edge = 0 if is_complete else content.rfind(b"\n") + 1
    return Beginning(content[: edge or len(content)], is_complete, num_bytes)


def _read_end(path: Path) -> bytes:
    """Return the last lines of a file; none of a compressed one, because all of it would be read."""
    if is_compressed(path):
        return b""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read().partition(b"\n")[2]  # without the first line, which is usually incomplete


def _sample_lines(path: Path, is_csv: bool) -> _SampledRows:
    content, is_complete, num_bytes = read_beginning(path)
    if not is_complete and b"\n" not in content:
        raise DataError(f"{path} has no line break in its first {MAX_BYTES >> 20} MiB; write one row per line")
    tail = b"" if is_complete else _read_end(path)
    if is_csv:
        text, last_text = (part.decode("utf-8-sig", errors="surrogateescape") for part in (content, tail))
        separator = find_separator(path, io.StringIO(text, newline="").readline())
        reader = csv_reader(io.StringIO(text, newline=""), path)
        header = read_header(path, reader)
        last_reader = csv_reader(io.StringIO(last_text, newline=""), path, separator)
        first, last = _csv_rows(header, reader), _csv_rows(header, last_reader)
    else:
        first, last = _jsonl_rows(content), _jsonl_rows(tail)
    # Exact if the whole file was read, else extrapolated from the mean length of a row.
    num_rows = len(first) if is_complete else round(len(first) * num_bytes / max(len(content), 1))
    return first[:_MAX_ROWS], (last or first[_MAX_ROWS:])[-_TAIL_ROWS:], num_rows


def _csv_rows(header: list[str], reader: Iterator[list[str]]) -> list[ParsedRow]:
    rows = enumerate(csv_cells(reader))  # a blank line has neither cells nor a problem
    return [csv_row(index, header, cells, problem) for index, (cells, problem) in rows if cells or problem]


def _jsonl_rows(content: bytes) -> list[ParsedRow]:
    lines = content.removeprefix(BYTE_ORDER_MARK).splitlines()
    return [parse_line(index, line) for index, line in enumerate(lines) if line.strip()]


def _sample_dataset(path: Path) -> _SampledRows:
    num_rows = len(open_dataset(path))
    ranges = ((0, min(num_rows, _MAX_ROWS)), (max(num_rows - _TAIL_ROWS, _MAX_ROWS), num_rows))
    first, last = (list(read_rows(RecordPart(path, "datasets", start, stop, 0))) for start, stop in ranges)
    return first, last, num_rows


def _sample_arrays(path: Path) -> _SampledRows:
    file = ArrayFile.open(path)
    max_rows = min(_MAX_ROWS, max(1, _MAX_ARRAY_BYTES // file.row_bytes))
    ranges = ((0, max_rows), (max(file.num_rows - min(max_rows, _TAIL_ROWS), max_rows), file.num_rows))
    # The end of a compressed array can only be reached by reading all of it.
    first, last = (list(file.read(None, start, stop)) if start < stop else [] for start, stop in ranges)
    first_rows, last_rows = ([ParsedRow(*row) for row in enumerate(records)] for records in (first, last))
    return first_rows, last_rows, file.num_rows


def _sample_parquet(path: Path) -> _SampledRows:
    file = open_parquet(path)
    num_rows, num_groups = file.metadata.num_rows, file.metadata.num_row_groups
    if not num_rows:
        return [], [], 0
    try:
        first = batch_records(next(file.iter_batches(_MAX_ROWS)), path)
        # A row group can't be read from its end, so read all of its batches and keep the last one.
        batches = deque(file.iter_batches(_MAX_ROWS, row_groups=[num_groups - 1]), maxlen=1)
        last = (
            [row for batch in batches for row in batch_records(batch[-_TAIL_ROWS:], path)]
            if num_rows > _MAX_ROWS
            else []
        )
    except (ValueError, OSError) as error:
        raise unreadable(path, error) from None
    first_rows, last_rows = ([ParsedRow(*row) for row in enumerate(records)] for records in (first, last))
    return first_rows, last_rows, num_rows
