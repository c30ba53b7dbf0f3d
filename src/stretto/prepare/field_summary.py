"""FieldSummary: the type of a field of records (a column of a table), inferred from some of its values."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from statistics import fmean
from typing import Any, Literal

from stretto.prepare.record_parser import as_list, infer_list_type, parse_number
from stretto.prepare.time_formats import find_time_formats, looks_like_time, parse_time

# An `unparsed time` looks like a time, but its format is unknown: 01/03/2012 could be in January or in March.
# A `category` is a boolean, or one of a few short texts. `words` are lists of texts.
FieldType = Literal[
    "text", "category", "number", "time", "unparsed time", "tokens", "channels", "words", "empty", "other"
]

_SEQUENCE_NAMES = ("inputs", "text", "tokens", "values")  # the usual names of a field that holds a sequence
_MAX_CLASSES = 1000  # a field with more distinct values than this is not a label
_MAX_NUMERIC_CLASSES = 100  # the same for integers: numeric labels have few distinct values, such as 1 to 5 stars
# The usual names of a column of times.
TIME_NAMES = ("time", "date", "datetime", "timestamp", "ds", "t", "step", "index")
_MAX_TIME_CHARS = 40  # a text column with such a name holds times if its texts are shorter than this on average
_MIN_TIME_FRACTION = 0.9  # a text field is an `unparsed time` if more than this fraction of its texts look like times
_MAX_CATEGORY_CHARS = 80  # the texts of a `category` are shorter than this on average


@dataclass(frozen=True)
class FieldSummary:
    """The type and the statistics of a field in some rows."""

    name: str
    type: FieldType
    num_values: int = 0  # without missing ones
    num_missing: int = 0
    num_unique: int = 0  # distinct values; 0 for lists
    mean_length: float = 0.0  # characters of a text, or elements of a list
    is_integer: bool = False  # whether all numbers are integers
    time_formats: tuple[str, ...] = ()  # of times that are not ISO; several if day and month can't be told apart
    has_nan: bool = False  # whether a value is NaN or infinite, or NA in a CSV file
    has_number: bool = False  # whether one of the texts is a number

    @property
    def has_sequence_name(self) -> bool:
        """Whether the field has one of the usual names for a sequence."""
        return self.name in _SEQUENCE_NAMES or (self.type == "words" and self.name == "words")

    @property
    def may_be_unparsed_time(self) -> bool:
        """Whether the field seems to hold times that can't be parsed, judging by its values (`type`) or by its name."""
        is_short = self.type in ("text", "category") and self.mean_length < _MAX_TIME_CHARS
        return self.type == "unparsed time" or (is_short and self.name.lower() in TIME_NAMES)

    @property
    def could_be_categories(self) -> bool:
        """Whether the field holds texts or booleans that can be categories.

        No value is a number, since that would be a typing error among numbers or texts.
        """
        return self.type in ("category", "text") and not self.has_number and not self.may_be_unparsed_time

    @property
    def is_constant(self) -> bool:
        """Whether all values are the same text, number or boolean; missing ones don't count."""
        return self.type in ("category", "number", "text") and self.num_unique == 1

    @property
    def could_be_label(self) -> bool:
        """Whether the field could be a label: it has few distinct values, and they repeat."""
        if self.type == "category":
            return 1 < self.num_unique <= _MAX_CLASSES
        has_few_values = 1 < self.num_unique <= min(_MAX_NUMERIC_CLASSES, self.num_values / 2)
        return self.type == "number" and self.is_integer and has_few_values

    @property
    def could_be_values(self) -> bool:
        """Whether the field could be values to predict: numbers, or lists of them."""
        return self.type in ("tokens", "channels") or (self.type == "number" and self.num_unique > 1)


def infer_fields(
    records: Sequence[Mapping[str, Any]], is_csv: bool, time_format: str | None = None
) -> tuple[FieldSummary, ...]:
    """Return a summary of each field, in order of first appearance; `time_format` says how times are written."""
    names = dict.fromkeys(name for record in records for name in record)
    return tuple(_infer_field(name, [record.get(name) for record in records], is_csv, time_format) for name in names)


def _infer_field(name: str, values: Sequence[object], is_csv: bool, time_format: str | None) -> FieldSummary:
    present = [value for value in values if not (value is None or (isinstance(value, str) and not value.strip()))]
    summary = FieldSummary(name, "other", len(present), len(values) - len(present))
    if not present:
        return replace(summary, type="empty")
    if all(isinstance(value, bool) for value in present):
        return replace(summary, type="category", num_unique=len(set(present)))
    numbers = [parse_number(value, is_csv) for value in present]
    if None not in numbers:
        finite = [number for number in numbers if number is not None and math.isfinite(number)]
        is_integer, has_nan = all(number == int(number) for number in finite), len(finite) < len(present)
        summary = replace(summary, num_unique=len(set(finite)), is_integer=is_integer, has_nan=has_nan)
        return replace(summary, type="number" if finite else "empty")
    if all(_is_time(value) for value in present):
        return replace(summary, type="time", num_unique=len({str(value) for value in present}))
    lists = [steps for value in present if (steps := as_list(value, is_csv)) is not None]
    if len(lists) == len(present):
        types = {type(step) for steps in lists for step in steps}
        value_type: FieldType = "words" if types == {str} else infer_list_type(name, types) or "other"
        return replace(summary, type=value_type, mean_length=fmean(map(len, lists)))
    texts = [value for value in present if isinstance(value, str)]
    if len(texts) < len(present):
        return summary
    has_number = any(number is not None and math.isfinite(number) for number in numbers)
    summary = replace(summary, num_unique=len(set(texts)), mean_length=fmean(map(len, texts)), has_number=has_number)
    if formats := _find_formats(texts, time_format):
        return replace(summary, type="time" if len(formats) == 1 else "unparsed time", time_formats=formats)
    if sum(map(looks_like_time, texts)) > _MIN_TIME_FRACTION * len(texts):
        return replace(summary, type="unparsed time")
    is_repetitive = summary.num_unique <= min(len(texts) / 2, _MAX_CLASSES)
    is_category = is_repetitive and summary.mean_length < _MAX_CATEGORY_CHARS
    return replace(summary, type="category" if is_category else "text")


def _find_formats(texts: Sequence[str], time_format: str | None) -> tuple[str, ...]:
    if time_format is None:
        return find_time_formats(texts)
    return (time_format,) if all(parse_time(text, time_format) is not None for text in texts) else ()


def _is_time(value: object) -> bool:
    return isinstance(value, date) or (isinstance(value, str) and parse_time(value) is not None)  # a datetime is a date
