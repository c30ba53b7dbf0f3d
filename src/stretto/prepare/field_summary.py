"""Fields: what the columns of a table, or the fields of records, seem to hold."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from statistics import fmean
from typing import Any, Literal

from stretto.prepare.record_parser import infer_list_type, parse_number
from stretto.prepare.time_formats import looks_like_time, parse_time

# `dates` are times that can't be read: 01/03/2012 may be January or March.
FieldType = Literal["text", "names", "numbers", "times", "dates", "tokens", "channels", "nothing", "other"]

# With more names than so many, they are not classes.
_MAX_CLASSES = 1000
# Numbers that are classes are few, such as stars.
_MAX_NUMERIC_CLASSES = 100


@dataclass(frozen=True)
class FieldSummary:
    """What some rows show of a field."""

    name: str
    type: FieldType
    num_values: int = 0  # values that are there
    num_missing: int = 0
    num_unique: int = 0
    mean_length: float = 0.0  # characters of text, or steps of a list
    is_integer: bool = False  # whole numbers only
    has_nan: bool = False  # NaN or infinities among the numbers

    @property
    def is_sequence(self) -> bool:
        return self.type in ("text", "tokens", "channels")

    @property
    def is_constant(self) -> bool:
        """Do all rows have the same value?"""
        return self.type in ("names", "numbers", "text") and self.num_unique == 1

    @property
    def is_categorical(self) -> bool:
        """Could it be the label of a row? A few different values, each of them often."""
        if self.type == "names":
            return 1 < self.num_unique <= _MAX_CLASSES
        is_few = 1 < self.num_unique <= min(_MAX_NUMERIC_CLASSES, self.num_values / 2)
        return self.type == "numbers" and self.is_integer and is_few


def infer_fields(records: Sequence[Mapping[str, Any]], is_csv: bool) -> tuple[FieldSummary, ...]:
    """Return what each field holds, in the order in which they are met."""
    names = dict.fromkeys(name for record in records for name in record)
    return tuple(_infer_field(name, [record.get(name) for record in records], is_csv) for name in names)


def _infer_field(name: str, values: Sequence[object], is_csv: bool) -> FieldSummary:
    there = [value for value in values if not (value is None or (isinstance(value, str) and not value.strip()))]
    num_missing = len(values) - len(there)
    if not there:
        return FieldSummary(name, "nothing", 0, num_missing)
    numbers = [parse_number(value, is_csv) for value in there]
    if all(isinstance(value, bool) for value in there):
        return FieldSummary(name, "names", len(there), num_missing, len(set(there)))
    if None not in numbers:
        finite = [number for number in numbers if number is not None and math.isfinite(number)]
        return FieldSummary(
            name,
            "numbers" if finite else "nothing",
            len(there),
            num_missing,
            len(set(finite)),
            is_integer=all(number == int(number) for number in finite),
            has_nan=len(finite) < len(there),
        )
    if all(_is_time(value) for value in there):
        return FieldSummary(name, "times", len(there), num_missing, len({str(value) for value in there}))
    lists = [as_list(value, is_csv) for value in there]
    known = [value for value in lists if value is not None]
    if len(known) == len(lists):
        holds = infer_list_type(name, {type(step) for value in known for step in value})
        return FieldSummary(name, holds or "other", len(there), num_missing, mean_length=fmean(map(len, known)))
    if all(isinstance(value, str) for value in there):
        texts = [str(value) for value in there]
        different, length = len(set(texts)), fmean(map(len, texts))
        if sum(map(looks_like_time, texts)) > 0.9 * len(texts):
            return FieldSummary(name, "dates", len(there), num_missing, different, length)
        is_names = different <= len(texts) / 2 and different <= _MAX_CLASSES and length < 80
        return FieldSummary(name, "names" if is_names else "text", len(there), num_missing, different, length)
    return FieldSummary(name, "other", len(there), num_missing)


def as_list(value: object, is_csv: bool) -> list[Any] | None:
    """Return the list that a value is, or that a cell of CSV spells as JSON does."""
    if is_csv and isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, list) else None


def _is_time(value: object) -> bool:
    return isinstance(value, date | datetime) or (isinstance(value, str) and parse_time(value) is not None)
