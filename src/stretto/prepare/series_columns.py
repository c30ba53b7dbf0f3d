"""SeriesColumns: which columns of a table are channels, and which of these hold categories."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from stretto.base.errors import DataError
from stretto.prepare.field_summary import infer_fields
from stretto.prepare.options import SeriesOptions
from stretto.prepare.record_parser import parse_number
from stretto.prepare.records import RecordPart, read_rows

# At most this many rows are read to see which columns hold numbers or categories: as many as `inspect_data` reads.
MAX_ROWS_SAMPLED = 2000


@dataclass(frozen=True)
class SeriesColumns:
    """The channels of a table."""

    names: tuple[str, ...]
    categories: tuple[str, ...] = ()  # those that hold text or booleans
    ignored: tuple[str, ...] = ()  # columns that are left out since they are neither numbers nor few texts


def choose_columns(part: RecordPart, options: SeriesOptions) -> SeriesColumns:
    """Return the columns that options name, or else those of numbers and those of few different texts."""
    rows = islice(read_rows(part), MAX_ROWS_SAMPLED)
    records, is_csv = [row.record for row in rows if not row.problem], part.format == "csv"
    texts = _find_texts(records, is_csv, options)
    added = (*options.known_future, *options.static)
    if options.columns is not None:
        names = (*options.columns, *(name for name in added if name not in options.columns))
        return SeriesColumns(names, tuple(name for name in names if name in texts))
    excluded = {options.by, options.time, *(options.targets or ())}
    numeric = _find_numeric(part, records, excluded, is_csv)
    chosen = [name for name in numeric if numeric[name] or texts.get(name) or name in added]
    chosen += [name for name in added if name not in chosen]
    categories = tuple(name for name in chosen if name in texts and not numeric.get(name))
    if not any(numeric.values()) and not (categories and options.targets):
        others = f", only {', '.join(sorted(numeric))}" if numeric else ""
        raise DataError(f"{part.path} has no column of numbers{others}; choose channels with columns=NAMES")
    return SeriesColumns(tuple(chosen), categories, tuple(name for name in numeric if name not in chosen))


def _find_texts(records: Sequence[Mapping[str, Any]], is_csv: bool, options: SeriesOptions) -> dict[str, bool]:
    """Return the columns that can be categories, and whether they have so few different texts that they surely are.

    Names of series always can, even if they look like numbers.
    """
    texts = {}
    for field in infer_fields(records, is_csv, options.time_format):
        if field.name == options.by:
            texts[field.name] = False
        elif field.could_be_categories:
            texts[field.name] = field.type == "category"
    return texts


def _find_numeric(
    part: RecordPart, records: Sequence[Mapping[str, Any]], excluded: set[str | None], is_csv: bool
) -> dict[str, bool]:
    """Return whether the first value of each column that is not missing is a number; raise if all are missing."""
    is_numeric: dict[str, bool] = {}
    for name in (name for name in (records[0] if records else {}) if name not in excluded):
        decided = (_is_number(record.get(name), is_csv) for record in records)
        first = next((is_number for is_number in decided if is_number is not None), None)
        if first is None:
            problem = f"{part.path}: {name!r} is missing, NaN or infinite up to row {len(records):,}"
            raise DataError(f"{problem}; choose channels with columns=NAMES")
        is_numeric[name] = first
    return is_numeric


def _is_number(value: object, is_csv: bool) -> bool | None:
    """Return whether a value is a number; None if it is missing, NaN or infinite, which decides nothing."""
    number = parse_number(value, is_csv)
    if number is None:
        return False
    return True if math.isfinite(number) else None
