"""Records: the rows of JSONL, CSV, Parquet and array files and of Hugging Face datasets, read in parts."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

from stretto.base.bounded_read import MAX_READ_BYTES, bounded_lines, parse_json, read_bounded
from stretto.base.errors import DataError
from stretto.base.extras import install_command
from stretto.base.locations import is_allowed
from stretto.base.reason import short_reason
from stretto.base.remote import is_remote
from stretto.prepare.arrow_tensors import batch_rows
from stretto.prepare.compression import content_suffix, is_compressed, open_binary, open_text
from stretto.prepare.csv_cells import LINE_TOO_LONG, READ_LIMIT, csv_cells, csv_reader, is_utf8, read_header
from stretto.prepare.downloads import localize
from stretto.prepare.file_stamp import file_stamp
from stretto.prepare.json_arrays import decode_array
from stretto.prepare.npz_file import ArrayFile
from stretto.prepare.remote_path import RemotePath
from stretto.prepare.text_files import TextFiles

RecordFormat = Literal["jsonl", "csv", "parquet", "npz", "datasets"]

FORMATS: dict[str, RecordFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".npz": "npz",
    ".npy": "npz",
}
_BATCH_ROWS = 1024
_READ_BYTES = 1 << 20
# The csv module's error messages for a quote that is never closed, and for a cell above the limit.
_UNCLOSED_QUOTE, _CELL_TOO_LONG = "unexpected end of data", "field larger than field limit"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class ParsedRow(NamedTuple):
    """A row of a part; the record is empty if there is a problem."""

    row_index: int  # in the part, from 0
    record: Mapping[str, Any]
    problem: str = ""  # why the row can't be read


@dataclass(frozen=True)
class RecordPart:
    """Consecutive rows of one file; a file of arrays or a compressed one is always one part."""

    path: Path
    format: RecordFormat
    # Both are in bytes (JSONL, CSV), row groups (Parquet) or rows (dataset, arrays).
    start: int
    stop: int  # sys.maxsize for the end of a compressed file or of a CSV file
    size: int  # in bytes, or in rows for a dataset
    stamp: str = ""  # of the file: changes when the file is modified
    per_row: tuple[str, ...] = ()  # arrays that have no time steps, so that `lengths` does not cut them
    has_arrays: bool = False  # the JSON may hold arrays as their bytes

    def row_number(self, row_index: int) -> int:
        """Return a row's number in its file, from 1: the line number in JSONL; in CSV, the header does not count."""
        if self.format == "jsonl":
            return _lines_before(self.path, self.start) + row_index + 1
        if self.format == "csv":
            num_before = sum(1 for _ in _csv_rows(replace(self, start=0, stop=self.start))) if self.start else 0
            return num_before + row_index + 1
        if self.format == "parquet":
            metadata = open_parquet(self.path).metadata
            return sum(int(metadata.row_group(group).num_rows) for group in range(self.start)) + row_index + 1
        return self.start + row_index + 1


def list_paths(files: Sequence[Path | str] | Path | str, *, is_local: bool = True) -> list[Path]:
    """Return the paths of one file or several; reject an empty list.

    URLs are downloaded, unless other machines read the files: then each reads what it needs (`is_local=False`).
    """
    given = [files] if isinstance(files, Path | str) else files
    paths = [localize(file) if is_local or not is_remote(file) else RemotePath.of_url(str(file)) for file in given]
    if not paths:
        raise DataError("there are no files to prepare; give at least one")
    return paths


def cut_records(paths: Sequence[Path], part_bytes: int | None) -> list[RecordPart]:
    """Cut files into parts of about `part_bytes` (None: one per file), independently of the number of workers."""
    parts: list[RecordPart] = []
    for path in paths:
        format = find_format(path)
        stamp = file_stamp(path)
        parts += (replace(part, stamp=stamp) for part in _cut(path, format, part_bytes or sys.maxsize))
    return parts


def read_rows(part: RecordPart, fields: Sequence[str] | None = None) -> Iterator[ParsedRow]:
    """Return the rows of a part; except from JSONL and CSV, only `fields` are read (None: all)."""
    if part.format == "jsonl":
        return _jsonl_rows(part)
    if part.format == "csv":
        return _csv_rows(part)
    records: Iterator[dict[str, Any]]
    if part.format == "parquet":
        records = _parquet_records(part, fields)
    elif part.format == "npz":
        records = ArrayFile.open(part.path).read(fields, part.start, part.stop, part.per_row)
    else:
        records = _dataset_records(part, fields)
    return (ParsedRow(index, record) for index, record in enumerate(records))


def shorten(value: object) -> str:
    """Return a value as JSON of at most 40 characters, for an error message."""
    text = json.dumps(value, default=str)
    return text if len(text) < 40 else text[:37] + "..."


def find_format(path: Path) -> RecordFormat:
    """Return the format of a file, by its name, or of a saved dataset; reject anything else."""
    if path.is_dir():
        if (path / "dataset_dict.json").is_file():
            raise DataError(f"{path} holds several datasets; use the folder of one of them")
        if (path / "state.json").is_file():
            return "datasets"
        raise DataError(f"{path} is a folder, but not a saved Hugging Face dataset; use the paths of the files in it")
    if not path.is_file():
        raise DataError(f"{path} is not a file; use the paths of files")
    suffix = content_suffix(path)
    if suffix not in FORMATS:
        known = ", ".join(FORMATS)
        raise DataError(f"{path}: its suffix {suffix!r} is not one of {known}; convert or rename it")
    check_compression(path)
    with open_binary(path) as file:
        if not file.read(1):
            raise DataError(f"{path} is empty; leave it out")
    return FORMATS[suffix]


def check_compression(path: Path) -> None:
    """Raise DataError if a compressed file holds a format that has its own compression and must be read at random."""
    suffix = content_suffix(path)
    if is_compressed(path) and FORMATS.get(suffix) in ("parquet", "npz"):
        raise DataError(f"{path} is {suffix} in {path.suffix}, so it is compressed twice; unpack it first")


def _cut(path: Path, format: RecordFormat, part_bytes: int) -> Iterator[RecordPart]:
    if format == "csv":
        with open_text(path) as file:
            read_header(path, csv_reader(file, path))  # rejects a bad header before any work starts
        yield RecordPart(path, format, 0, sys.maxsize, path.stat().st_size)  # `cut_csv` cuts a large one
    elif format == "jsonl" and is_compressed(path):
        yield RecordPart(path, format, 0, sys.maxsize, path.stat().st_size)
    elif format == "jsonl":
        texts, start = TextFiles.open([path]), 0
        while start < texts.num_bytes:
            # The start of the first line at or after `start + part_bytes`, or the end of the file.
            stop = texts.next_line(start + part_bytes - 1)
            yield RecordPart(path, format, start, stop, stop - start)
            start = stop
    elif format == "parquet":
        yield from _cut_parquet(path, part_bytes)
    elif format == "npz":
        yield RecordPart(path, format, 0, ArrayFile.open(path).num_rows, path.stat().st_size)
    else:
        dataset = open_dataset(path)
        if not len(dataset):
            raise DataError(f"{path} has no rows; leave it out")
        part_rows = max(1, part_bytes * len(dataset) // max(1, dataset.data.nbytes))
        for start in range(0, len(dataset), part_rows):
            stop = min(start + part_rows, len(dataset))
            yield RecordPart(path, format, start, stop, stop - start)


def _jsonl_rows(part: RecordPart) -> Iterator[ParsedRow]:
    with open_binary(part.path, part.start) as file:
        bytes_left = part.stop - part.start
        for index, line in enumerate(bounded_lines(file)):
            if line is None:
                if not is_compressed(part.path):
                    bytes_left = part.stop - file.tell()
                yield ParsedRow(index, {}, LINE_TOO_LONG)
            else:
                bytes_left -= len(line)
                if not index and not part.start:
                    line = line.removeprefix(BYTE_ORDER_MARK)
                # A blank line is not a row, but it counts, so that row numbers are line numbers.
                if not line.isspace():
                    yield parse_line(index, line, decode_array if part.has_arrays else None)
            if bytes_left <= 0:
                return


def parse_line(index: int, line: bytes, object_hook: Callable[[dict[str, Any]], object] | None = None) -> ParsedRow:
    """Parse a line of JSONL into a row; `object_hook` is that of `json.loads`."""
    try:
        record = json.loads(line.decode("utf-8"), object_hook=object_hook)
    except UnicodeDecodeError as error:
        return ParsedRow(index, {}, f"byte {error.start + 1:,} of the line is not UTF-8")
    except json.JSONDecodeError as error:  # some messages end in " at", for a position to follow
        return ParsedRow(index, {}, f"the line is not JSON ({error.msg.removesuffix(' at')}, character {error.colno})")
    except (ValueError, RecursionError) as error:
        return ParsedRow(index, {}, f"the JSON of the line can't be read ({error})")
    if not isinstance(record, dict):
        return ParsedRow(index, {}, f"the line is not a JSON object but {shorten(record)}")
    return ParsedRow(index, record)


def _csv_rows(part: RecordPart) -> Iterator[ParsedRow]:
    index, is_blank = 0, False
    with open_text(part.path, 0, sys.maxsize if part.start else part.stop) as file, ExitStack() as stack:
        reader = csv_reader(file, part.path)
        header = read_header(part.path, reader)
        if part.start:
            rows = stack.enter_context(open_text(part.path, part.start, part.stop))
            reader = csv_reader(rows, part.path, ",")
        for cells, problem in csv_cells(reader):
            # With one column, a blank line is an empty cell, except at the end: yield it only if another line follows.
            if is_blank and len(header) == 1:
                yield csv_row(index, header, [""])
                index += 1
            is_blank = not cells and not problem
            if problem.startswith((_UNCLOSED_QUOTE, _CELL_TOO_LONG, LINE_TOO_LONG)):
                # Not just one bad row: the rest of the file can't be split into rows.
                where = f"{part.path}, row {part.row_number(index):,}"
                if problem == _UNCLOSED_QUOTE:
                    raise DataError(f"{where}: a quote is opened in this row and never closed; fix the file")
                raise DataError(
                    f"{where}: a line or cell is longer than {READ_LIMIT}, or a quote is open; fix the file"
                )
            if not is_blank:
                yield csv_row(index, header, cells, problem)
                index += 1
    if not index and part.stop == sys.maxsize and not part.start:
        raise DataError(f"{part.path} has a header but no rows; leave it out")


def csv_row(index: int, header: list[str], cells: list[str], problem: str = "") -> ParsedRow:
    """Return the row with these cells; `problem` is the csv module's message about a row that it can't read."""
    if problem:
        return ParsedRow(index, {}, f"the row can't be read ({problem})")
    if not header[-1]:  # the header line ends with a separator
        header, cells, extra = header[:-1], cells[: len(header) - 1], cells[len(header) - 1 :]
        if extra and "".join(extra):
            return ParsedRow(index, {}, f"its last cell is {shorten(extra[-1])}, but the header has no name for it")
    if len(cells) != len(header):
        return ParsedRow(index, {}, f"its number of cells is {len(cells)}, not {len(header)} as in the header")
    for name, cell in zip(header, cells, strict=True):
        if not cell.isascii() and not is_utf8(cell):
            return ParsedRow(index, {}, f"the cell in column {name!r} is not UTF-8")
    return ParsedRow(index, dict(zip(header, cells, strict=True)))


def _lines_before(path: Path, stop: int) -> int:
    """Return the number of lines in the first `stop` bytes of a file."""
    num_lines = 0
    with open_binary(path) as file:
        while stop > 0 and (block := file.read(min(_READ_BYTES, stop))):
            num_lines += block.count(b"\n")
            stop -= len(block)
    return num_lines


def _import_extra(module: str, extra: str, path: Path) -> Any:  # noqa: ANN401 - an optional library, without types
    try:
        return import_module(module)
    except ImportError:
        name = module.split(".")[0]
        raise DataError(f"reading {path} needs {name}; {install_command(extra)}") from None


def open_parquet(path: Path) -> Any:  # noqa: ANN401 - pyarrow has no types
    """Open a Parquet file."""
    parquet = _import_extra("pyarrow.parquet", "parquet", path)
    try:
        return parquet.ParquetFile(path)
    except (ValueError, OSError) as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: Exception) -> DataError:
    """Return the error for a file that a library can't read."""
    return DataError(f"{path} can't be read ({short_reason(error)}); copy or write it again")


def _cut_parquet(path: Path, part_bytes: int) -> Iterator[RecordPart]:
    metadata = open_parquet(path).metadata
    if not metadata.num_rows:
        raise DataError(f"{path} has no rows; leave it out")
    start = size = 0
    for group in range(metadata.num_row_groups):
        size += metadata.row_group(group).total_byte_size
        if size >= part_bytes or group == metadata.num_row_groups - 1:
            yield RecordPart(path, "parquet", start, group + 1, size)
            start, size = group + 1, 0


def _parquet_records(part: RecordPart, fields: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    file = open_parquet(part.path)
    names = [name for name in file.schema_arrow.names if fields is None or name in fields]
    try:
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=range(part.start, part.stop), columns=names):
            # A row without any of the columns is still a row, an empty one.
            yield from batch_records(batch, part.path) if names else ({} for _ in range(batch.num_rows))
    except (ValueError, OSError) as error:
        raise unreadable(part.path, error) from None


def batch_records(batch: Any, path: Path) -> list[dict[str, Any]]:  # noqa: ANN401 - pyarrow has no types
    """Return the rows of a batch; raise if a row is larger than a line of a text file may be."""
    sizes = (batch.slice(row, 1).nbytes for row in range(batch.num_rows))
    if batch.nbytes > MAX_READ_BYTES and max(sizes) > MAX_READ_BYTES:
        raise DataError(f"{path} has a row of more than {READ_LIMIT}; split it into several rows")
    return batch_rows(batch)


def open_dataset(path: Path) -> Any:  # noqa: ANN401 - an optional library
    """Open a saved Hugging Face dataset; its rows are read as plain Python values, whatever its saved format."""
    datasets = _import_extra("datasets", "datasets", path)
    try:
        _check_data_files(path)
        return datasets.load_from_disk(str(path)).with_format(None)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise unreadable(path, error) from None


def _check_data_files(path: Path) -> None:
    """Raise if a saved dataset names a file outside its folder, or has a link to one."""
    for name in [file["filename"] for file in parse_json(read_bounded(path / "state.json"))["_data_files"]]:
        if not is_allowed(str(path / name), [str(path)]):
            raise DataError(f"{path}: state.json lists {name!r}, which is outside the folder; don't trust it")


def _dataset_records(part: RecordPart, fields: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    dataset = open_dataset(part.path)
    dataset = dataset.select_columns([name for name in dataset.column_names if fields is None or name in fields])
    for start in range(part.start, part.stop, _BATCH_ROWS):
        columns = dataset[start : min(start + _BATCH_ROWS, part.stop)]
        for row in range(min(_BATCH_ROWS, part.stop - start)):
            yield {name: column[row] for name, column in columns.items()}
