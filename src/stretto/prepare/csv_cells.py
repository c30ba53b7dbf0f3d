"""Cells of CSV text: the separator, found in the header line, the names of the columns, and the cells of each row."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from stretto.base.bounded_read import MAX_READ_BYTES
from stretto.base.errors import DataError
from stretto.prepare.compression import content_suffix
from stretto.prepare.decimal_commas import DecimalCommas, to_point
from stretto.prepare.time_formats import looks_like_time

READ_LIMIT = f"{MAX_READ_BYTES >> 20} MiB"
LINE_TOO_LONG = f"the line is longer than {READ_LIMIT}"
_SEPARATOR_LINE = re.compile(r"sep=[;,|\t]\s*")  # Excel's, above the header
_QUOTED = re.compile(r'"[^"]*"?')


def find_separator(path: Path, header: str) -> str:
    """Return what separates the columns, judging by the header line: a tab, semicolon, comma or vertical bar."""
    if content_suffix(path) == ".tsv":
        return "\t"
    names = _QUOTED.sub("", header)
    if "\t" in names:
        return "\t"
    # Where semicolons separate, names such as `load, MW` may have commas.
    if ";" in names and names.count(";") >= names.count(","):
        return ";"
    return "|" if "|" in names and "," not in names else ","


def csv_reader(text: TextIO, path: Path, separator: str | None = None) -> Iterator[list[str]]:
    """Return a reader for CSV text; a line or cell of more than `MAX_READ_BYTES` characters is a csv.Error.

    If `separator` is None, the text begins with the header, and it is found there. Unless it is a comma, a cell such as
    1,5 is a `DecimalCommaText`, which is read as the number 1.5 where a number is expected.
    """
    csv.field_size_limit(MAX_READ_BYTES)  # the default, 131,072 characters, is too low for a long text
    first = text.readline(MAX_READ_BYTES + 1)
    if separator is None and _SEPARATOR_LINE.fullmatch(first):
        first = text.readline(MAX_READ_BYTES + 1)
    separator = separator or find_separator(path, first)
    reader = csv.reader(_csv_lines(first, text), delimiter=separator, strict=True)
    # `map`, not a generator: after a csv.Error, the next row can still be read.
    return reader if separator == "," else map(DecimalCommas(path, separator), reader)


def _csv_lines(line: str, text: TextIO) -> Iterator[str]:
    """Yield a line and those after it."""
    while line:
        if len(line) > MAX_READ_BYTES:
            raise csv.Error(LINE_TOO_LONG)
        yield line
        line = text.readline(MAX_READ_BYTES + 1)


def read_header(path: Path, reader: Iterator[list[str]]) -> list[str]:
    """Return the names of the columns; reject a header line that doesn't name each column.

    Many programs end each line with a separator, so an empty last name is kept; `csv_row` leaves that column out.
    """
    try:
        header = next(reader, [])
    except csv.Error as error:
        raise DataError(f"{path}: its header line can't be read ({error}); fix it") from None
    for name in header[:-1] if len(header) > 1 and not header[-1] else header:
        if not name or not is_utf8(name) or header.count(name) > 1:
            raise DataError(f"{path}: the column name {name!r} is empty, repeated or not UTF-8; rename it")
    if not header or all(_is_number(name) or looks_like_time(name) for name in header if name):
        raise DataError(f"{path}: its first line is blank or has only numbers and times; write the column names there")
    return header


def csv_cells(reader: Iterator[list[str]]) -> Iterator[tuple[list[str], str]]:
    """Yield the cells of each row and an empty string, or no cells and the reason why the row can't be read."""
    while True:
        try:
            yield next(reader), ""
        except StopIteration:
            return
        except csv.Error as error:
            yield [], str(error)


def is_utf8(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8: not if it has surrogates, as made by `open_text` of bad bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_number(text: str) -> bool:
    try:
        float(to_point(text))
    except ValueError:
        return False
    return True
