"""Rows: what makes a record a sequence with a label, and what is done with one that can't be."""

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import DataError
from stretto.prepare.records import Found, RecordPart, shorten
from stretto.store.vocabulary import Level, split_symbols

BadRowPolicy = Literal["refuse", "skip"]
NanPolicy = Literal["refuse", "missing"]
What = Literal["text", "tokens", "channels"]

_MOST_TOKENS = 1 << 32
LARGEST = float(np.finfo(np.float32).max)
# What programs write into a cell of CSV without a number; it is a NaN, such as float() itself takes "nan" for.
_NOT_THERE = {"na", "n/a", "#n/a", "null", "none"}
_NUMBERS = {int, float, Decimal, type(None)}


class BadRow(Exception):  # noqa: N818 - it never leaves this room
    """A row that no sequence can be made of."""

    def __init__(self, what: str, remedy: str = "mend it") -> None:
        super().__init__(what)
        self.what, self.remedy = what, remedy


def record_of(row: Found) -> Mapping[str, Any]:
    """Return the record of a row that has one."""
    if row.problem:
        raise BadRow(row.problem)
    return row.record


@dataclass(frozen=True)
class Skipped:
    """Rows that were left out: how many, and where and why the first."""

    num_rows: int
    first: str

    @property
    def counted(self) -> str:
        return f"{self.num_rows:,} bad row{'' if self.num_rows == 1 else 's'}"


OnSkipped = Callable[[Skipped], None]


def warn_of_skipped(skipped: Skipped) -> None:
    """Say in the log that rows were left out."""
    logging.getLogger("stretto").warning("left out %s, the first: %s", skipped.counted, skipped.first)


@dataclass
class BadRows:
    """The bad rows of a part: the first is refused, or all are counted."""

    part: RecordPart
    policy: BadRowPolicy
    num_rows: int = 0
    first: str = ""

    def meet(self, place: int, bad: BadRow) -> None:
        if not self.num_rows:
            self.first = f"{self.part.path}, row {self.part.row_number(place):,}: {bad.what}"
        if self.policy == "refuse":
            raise DataError(f"{self.first}; {bad.remedy}, or leave such rows out with --bad-rows skip")
        self.num_rows += 1


def check_policies(bad_rows: str, nan: str) -> None:
    """Refuse words that are no policies."""
    if bad_rows not in ("refuse", "skip"):
        raise DataError(f"--bad-rows={bad_rows!r} is not refuse or skip; use one of these")
    if nan not in ("refuse", "missing"):
        raise DataError(f"--nan={nan!r} is not refuse or missing; use one of these")


@dataclass(frozen=True)
class Reading:
    """How a record becomes a sequence: which fields, and what they hold."""

    sequence: str
    what: What
    label: str | None = None
    level: Level = "byte"  # of text
    num_tokens: int | None = None  # if it is known beforehand
    num_channels: int | None = None  # none: a step is a plain number
    classes: Mapping[str, int] | None = None  # if they are known beforehand
    nan: NanPolicy = "refuse"

    @property
    def fields(self) -> list[str]:
        return [self.sequence] if self.label is None else [self.sequence, self.label]

    def text(self, record: Mapping[str, Any]) -> str:
        """Return a record's text."""
        value = _take(record, self.sequence)
        if not isinstance(value, str):
            raise BadRow(f"{self.sequence!r} is {shorten(value)}, not text")
        if not value or (self.level == "word" and value.isspace() and not split_symbols(value, "word")):
            raise BadRow(f"{self.sequence!r} is empty")
        _check_text(value, self.sequence)
        return value

    def steps(self, record: Mapping[str, Any], is_cell: bool) -> NDArray[Any]:
        """Return a record's tokens [steps] or channels [steps, channels]."""
        value = _take_list(record, self.sequence, is_cell)
        return self._tokens(value) if self.what == "tokens" else self._channels(value)

    def label_name(self, record: Mapping[str, Any]) -> str | None:
        """Return the name of a record's class."""
        if self.label is None:
            return None
        value = _take(record, self.label)
        # Where some labels are missing, others become floats in a table.
        if isinstance(value, float | Decimal) and math.isfinite(value) and value == int(value):
            value = int(value)
        if not isinstance(value, str | int) or value == "":
            raise BadRow(f"{self.label!r} is {shorten(value)}, not a label: text or a whole number")
        name = shorten(value) if isinstance(value, bool) else str(value)
        _check_text(name, self.label)
        if self.classes is not None and name not in self.classes:
            raise BadRow(
                f"{self.label!r} is {shorten(value)}, which is none of the {len(self.classes)} classes of --like"
            )
        return name

    def _tokens(self, value: list[Any]) -> NDArray[np.int64]:
        _check_kinds(value, {int}, self.sequence, "a whole number")
        limit = _MOST_TOKENS if self.num_tokens is None else self.num_tokens
        if min(value) < 0:
            raise BadRow(f"{self.sequence!r} has token {min(value)}, which is negative")
        if max(value) >= limit:
            raise BadRow(f"{self.sequence!r} has token {max(value)}, but there are only {limit:,} (from 0)")
        return np.array(value, np.int64)

    def _channels(self, value: list[Any]) -> NDArray[np.float64]:
        if self.num_channels is None:
            return _to_numbers(value, self.sequence, self.nan)[:, None]
        _check_kinds(value, {list}, self.sequence, "a list of numbers")
        lengths = set(map(len, value))
        if lengths != {self.num_channels}:
            found = next(len(step) for step in value if len(step) != self.num_channels)
            raise BadRow(f"{self.sequence!r} has a step of {found} numbers where others have {self.num_channels}")
        numbers = list(chain.from_iterable(value))
        return _to_numbers(numbers, self.sequence, self.nan).reshape(-1, self.num_channels)


def to_number(value: object, name: str, nan: NanPolicy, is_cell: bool = False) -> float:
    """Return a number that a 32-bit float has room for, NaN if it is missing."""
    number = parse_number(value, is_cell)
    if number is None:
        raise BadRow(f"{name!r} has {shorten(value)}, not a number")
    if not math.isfinite(number) and not _is_missing(value, is_cell):
        if nan == "refuse":
            raise BadRow(
                f"{name!r} has a NaN or an infinity", "mend it, take it for a missing value with --nan missing"
            )
        number = math.nan
    if abs(number) > LARGEST:
        raise BadRow(f"{name!r} has a number that is too large for 32-bit floats", "scale it")
    return number


def parse_number(value: object, is_cell: bool) -> float | None:
    """Return the number that a value or a cell of CSV is, NaN if it is missing; nothing, if it is no number."""
    if _is_missing(value, is_cell) or (is_cell and isinstance(value, str) and value.strip().lower() in _NOT_THERE):
        return math.nan
    if not isinstance(value, str if is_cell else int | float | Decimal) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except ValueError:
        return None
    except OverflowError:
        return 2 * LARGEST


def _is_missing(value: object, is_cell: bool) -> bool:
    return value is None or (is_cell and isinstance(value, str) and not value.strip())


def _to_numbers(value: list[Any], name: str, nan: NanPolicy) -> NDArray[np.float64]:
    _check_kinds(value, _NUMBERS, name, "a number")
    try:
        numbers = np.array(value, np.float64)
        # Where all are ordinary or missing, asking them all at once is enough.
        if np.count_nonzero(~(np.abs(numbers) <= LARGEST)) == value.count(None):
            return numbers
    except OverflowError:
        pass
    return np.array([to_number(number, name, nan) for number in value])


def decide(record: Mapping[str, Any], is_cell: bool, sequence: str | None, what: What | None) -> Reading:
    """Return how records like this one are to be read."""
    names = ("text", "tokens", "values") if sequence is None else (sequence,)
    name = next((name for name in names if record.get(name) is not None), None)
    if name is None:
        asked = "none of 'text', 'tokens' and 'values'" if sequence is None else f"no {sequence!r}"
        raise BadRow(f"it has {asked}, only {sorted(record)}", "name the field with --sequence")
    if what is None and name in ("tokens", "values"):
        what = "tokens" if name == "tokens" else "channels"
    value = record[name]
    if what is None:
        what = "text" if isinstance(value, str) else _list_kind(_take_list(record, name, is_cell), name)
    if what != "channels":
        return Reading(name, what)
    steps = _take_list(record, name, is_cell)
    return Reading(name, what, num_channels=len(steps[0]) if isinstance(steps[0], list) else None)


def sort_names(names: set[str]) -> list[str]:
    """Return the names of classes in order: whole numbers by value, anything else as text."""
    is_numeric = all(name.removeprefix("-").isascii() and name.removeprefix("-").isdigit() for name in names)
    return sorted(names, key=lambda name: (int(name), name)) if is_numeric else sorted(names)


def what_lists_hold(name: str, kinds: set[type]) -> What | None:
    """Return what lists in a field with steps of these types hold, if it is something to learn from."""
    if kinds == {int} and name != "values":
        return "tokens"
    return "channels" if kinds == {list} or (kinds and kinds <= _NUMBERS) else None


def _list_kind(value: list[Any], name: str) -> What:
    found = what_lists_hold(name, set(map(type, value)))
    if found is None:
        raise BadRow(f"{name!r} is {shorten(value)}, which is neither text nor a list of numbers")
    return found


def _take(record: Mapping[str, Any], name: str) -> object:
    value = record.get(name)
    if value is None:
        raise absent(record, name)
    return value


def absent(record: Mapping[str, Any], name: str) -> BadRow:
    """Return what is bad about a row without a field: it has other fields, or no value in this one."""
    if name in record:
        return BadRow(f"{name!r} is empty")
    return BadRow(f"it has no {name!r}, only {shorten(list(record))}")


def _take_list(record: Mapping[str, Any], name: str, is_cell: bool) -> list[Any]:
    value = _take(record, name)
    if is_cell and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadRow(f"{name!r} is {shorten(value)}, not a list as JSON has it") from None
    if not isinstance(value, list):
        raise BadRow(f"{name!r} is {shorten(value)}, not a list")
    if not value:
        raise BadRow(f"{name!r} is a sequence of no steps")
    return value


def _check_kinds(value: list[Any], kinds: set[type], name: str, wanted: str) -> None:
    # Asked of all types at once, without a loop of ours: a sequence may have a million steps.
    if not set(map(type, value)) <= kinds:
        found = next(step for step in value if type(step) not in kinds)
        raise BadRow(f"{name!r} has {shorten(found)}, not {wanted}")


def _check_text(value: str, name: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRow(f"{name!r} has half of a surrogate pair, which is not UTF-8") from None
