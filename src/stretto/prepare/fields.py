"""Fields: what the columns of a table, or the fields of records, seem to hold."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from statistics import fmean
from typing import Any, Literal

from stretto.prepare.rows import parse_number, what_lists_hold
from stretto.prepare.times import looks_like_time, read_time

# `dates` are times that can't be read: 01/03/2012 may be January or March.
Holds = Literal["text", "names", "numbers", "times", "dates", "tokens", "channels", "nothing", "other"]

# With more names than so many, they are not classes.
_MOST_CLASSES = 1000
# Numbers that are classes are few, such as stars.
_MOST_NUMBERED = 100


@dataclass(frozen=True)
class Field:
    """What some rows show of a field."""

    name: str
    holds: Holds
    num_seen: int = 0  # values that are there
    num_missing: int = 0
    num_different: int = 0
    mean_length: float = 0.0  # characters of text, or steps of a list
    is_whole: bool = False  # whole numbers only
    has_nan: bool = False  # NaN or infinities among the numbers

    @property
    def is_sequence(self) -> bool:
        return self.holds in ("text", "tokens", "channels")

    @property
    def is_alike(self) -> bool:
        """Do all rows have the same value?"""
        return self.holds in ("names", "numbers", "text") and self.num_different == 1

    @property
    def is_classes(self) -> bool:
        """Could it be the label of a row? A few different values, each of them often."""
        if self.holds == "names":
            return 1 < self.num_different <= _MOST_CLASSES
        is_few = 1 < self.num_different <= min(_MOST_NUMBERED, self.num_seen / 2)
        return self.holds == "numbers" and self.is_whole and is_few


def find_fields(records: Sequence[Mapping[str, Any]], is_cells: bool) -> tuple[Field, ...]:
    """Return what each field holds, in the order in which they are met."""
    names = dict.fromkeys(name for record in records for name in record)
    return tuple(_find_field(name, [record.get(name) for record in records], is_cells) for name in names)


def _find_field(name: str, values: Sequence[object], is_cells: bool) -> Field:
    there = [value for value in values if not (value is None or (isinstance(value, str) and not value.strip()))]
    num_missing = len(values) - len(there)
    if not there:
        return Field(name, "nothing", 0, num_missing)
    numbers = [parse_number(value, is_cells) for value in there]
    if all(isinstance(value, bool) for value in there):
        return Field(name, "names", len(there), num_missing, len(set(there)))
    if None not in numbers:
        finite = [number for number in numbers if number is not None and math.isfinite(number)]
        return Field(
            name,
            "numbers" if finite else "nothing",
            len(there),
            num_missing,
            len(set(finite)),
            is_whole=all(number == int(number) for number in finite),
            has_nan=len(finite) < len(there),
        )
    if all(_is_time(value) for value in there):
        return Field(name, "times", len(there), num_missing, len({str(value) for value in there}))
    lists = [as_list(value, is_cells) for value in there]
    known = [value for value in lists if value is not None]
    if len(known) == len(lists):
        holds = what_lists_hold(name, {type(step) for value in known for step in value})
        return Field(name, holds or "other", len(there), num_missing, mean_length=fmean(map(len, known)))
    if all(isinstance(value, str) for value in there):
        texts = [str(value) for value in there]
        different, length = len(set(texts)), fmean(map(len, texts))
        if sum(map(looks_like_time, texts)) > 0.9 * len(texts):
            return Field(name, "dates", len(there), num_missing, different, length)
        is_names = different <= len(texts) / 2 and different <= _MOST_CLASSES and length < 80
        return Field(name, "names" if is_names else "text", len(there), num_missing, different, length)
    return Field(name, "other", len(there), num_missing)


def as_list(value: object, is_cell: bool) -> list[Any] | None:
    """Return the list that a value is, or that a cell of CSV spells as JSON does."""
    if is_cell and isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, list) else None


def _is_time(value: object) -> bool:
    return isinstance(value, date | datetime) or (isinstance(value, str) and read_time(value) is not None)
