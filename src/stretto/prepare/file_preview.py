"""FilePreview: the first rows of a file of records and some of the last, however large it is."""

import csv
import io
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stretto.base.errors import DataError
from stretto.prepare.records import Format, ParsedRow, check_header, csv_row, find_format, open_dataset, open_parquet
from stretto.prepare.records import parse_line as parse_jsonl

# How much of a file is read.
MAX_BYTES = 1 << 20
MAX_ROWS = 2000
_TAIL_BYTES = 64 << 10
_TAIL_ROWS = 100


@dataclass(frozen=True)
class FilePreview:
    """Rows from the beginning and the end of a file."""

    format: Format
    rows: tuple[ParsedRow, ...]  # the first ones
    last: tuple[ParsedRow, ...]  # some of the last ones, if there are more
    num_rows: int  # in the whole file, approximately

    @property
    def is_csv(self) -> bool:
        """Is every value text, as in CSV?"""
        return self.format == "csv"


def preview_file(path: Path) -> FilePreview:
    """Read the beginning and the end of a file of records."""
    format = find_format(path)
    if format == "parquet":
        return _preview_parquet(path)
    if format == "datasets":
        dataset = open_dataset(path)
        rows = [dataset[index] for index in range(min(len(dataset), MAX_ROWS))]
        last = [dataset[index] for index in range(max(len(dataset) - _TAIL_ROWS, MAX_ROWS), len(dataset))]
        return FilePreview(format, _parsed_rows(rows), _parsed_rows(last), len(dataset))
    content, is_complete = read_beginning(path)
    if not is_complete and b"\n" not in content:
        raise DataError(f"{path} has no line break in its first {MAX_BYTES >> 20} MiB; is it {format}?")
    tail = b"" if is_complete else _read_end(path)
    if format == "csv":
        header, rows = _preview_csv(path, content, is_complete)
        ending = _csv_rows(header, tail) if tail else rows[MAX_ROWS:]
        num_seen = len(rows)
    else:
        lines = [line for line in content.removeprefix(b"\xef\xbb\xbf").splitlines() if line.strip()]
        num_seen = len(lines)
        rows = [parse_jsonl(index, line) for index, line in enumerate(lines[:MAX_ROWS])]
        ending = [parse_jsonl(0, line) for line in (tail.splitlines() or lines[MAX_ROWS:])[-_TAIL_ROWS:]]
    if not rows:
        raise DataError(f"{path} has no rows; choose a different file")
    # Exact if the whole file was read, else extrapolated from the mean length of a row.
    num_rows = num_seen if is_complete else round(num_seen * path.stat().st_size / max(len(content), 1))
    return FilePreview(format, tuple(rows[:MAX_ROWS]), tuple(ending[-_TAIL_ROWS:]), num_rows)


def read_beginning(path: Path) -> tuple[bytes, bool]:
    """Return the first bytes of a file, up to the end of a line, and whether they are the whole file."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES)
            is_complete = len(content) == os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror}); choose a different file") from None
    if is_complete:
        return content, True
    edge = content.rfind(b"\n") + 1
    return content[: edge or len(content)], False


def _read_end(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        # The first line is incomplete.
        return file.read().partition(b"\n")[2]


def _preview_csv(path: Path, content: bytes, is_complete: bool) -> tuple[list[str], list[ParsedRow]]:
    reader = csv.reader(io.StringIO(_text(content), newline=""), strict=True)
    try:
        header = next(reader, [])
    except csv.Error as error:
        raise DataError(f"{path}: its header line can't be read ({error}); fix it") from None
    rows = list(_cells(check_header(path, header), reader))
    # The last row may be incomplete, within quotes.
    return header, rows if is_complete or not rows or not rows[-1].problem else rows[:-1]


def _csv_rows(header: list[str], content: bytes) -> list[ParsedRow]:
    return list(_cells(header, csv.reader(io.StringIO(_text(content), newline=""), strict=True)))


def _cells(header: list[str], reader: Iterator[list[str]]) -> Iterator[ParsedRow]:
    index = 0
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield ParsedRow(index, {}, f"the row can't be read ({error})")
            continue
        if cells:
            yield csv_row(index, header, cells)
            index += 1


def _text(content: bytes) -> str:
    return content.decode("utf-8-sig", errors="surrogateescape")


def _preview_parquet(path: Path) -> FilePreview:
    file = open_parquet(path)
    num_rows, num_groups = file.metadata.num_rows, file.metadata.num_row_groups
    if not num_rows:
        raise DataError(f"{path} has no rows; choose a different file")
    try:
        first = next(file.iter_batches(MAX_ROWS)).to_pylist()
        # A row group can't be read from its end.
        (end,) = deque(file.iter_batches(MAX_ROWS, row_groups=[num_groups - 1]), maxlen=1)
        last = end.slice(max(0, end.num_rows - _TAIL_ROWS)).to_pylist()
    except (ValueError, OSError) as error:
        raise DataError(f"{path} can't be read ({str(error).splitlines()[0]}); write it again") from None
    return FilePreview("parquet", _parsed_rows(first), _parsed_rows(last if num_rows > MAX_ROWS else []), num_rows)


def _parsed_rows(records: list[dict[str, object]]) -> tuple[ParsedRow, ...]:
    return tuple(ParsedRow(index, record) for index, record in enumerate(records))
