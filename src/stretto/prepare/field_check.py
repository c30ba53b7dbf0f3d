"""check_fields: compares the fields that options name with those of the files, before any row is parsed."""

from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from pathlib import Path

from stretto.base.errors import DataError
from stretto.prepare.records import RecordPart, read_rows

_MAX_ROWS = 100  # rows of CSV and Parquet files all have the same fields; JSONL records may leave some out


def check_fields(parts: Sequence[RecordPart], given: Iterable[tuple[str, str | None]]) -> None:
    """Raise DataError if a file lacks a field that an option names; `given` holds options and the names in them."""
    options = [(option, name) for option, name in given if name is not None]
    for part in parts:
        if not options or part.start > 0:  # one part of each file is enough
            continue
        names = dict.fromkeys(name for row in islice(read_rows(part), _MAX_ROWS) for name in row.record)
        # Without names, none of these rows can be read: another error will say so.
        for option, name in options if names else []:
            check_field(option, name, part.path, names)


def check_field(option: str, name: str, path: Path, names: Collection[str]) -> None:
    """Raise DataError if the field that an option names is not one of a file's."""
    if name not in names:
        raise DataError(f"{option}={name} is not a field of {path}; choose from {', '.join(names)}")
