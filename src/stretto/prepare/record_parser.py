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
from stretto.prepare.records import ParsedRow, RecordPart, shorten
from stretto.store.vocabulary import Level, split_symbols

BadRowPolicy = Literal["refuse", "skip"]
NanPolicy = Literal["refuse", "missing"]
ValueType = Literal["text", "tokens", "channels"]

_MAX_TOKENS = 1 << 32
FLOAT32_MAX = float(np.finfo(np.float32).max)
# What programs write into a cell of CSV without a number; it is a NaN, such as float() itself takes "nan" for.
_NA_VALUES = {"na", "n/a", "#n/a", "null", "none"}
_NUMBERS = {int, float, Decimal, type(None)}


class BadRowError(Exception):
    """A row that no sequence can be made of."""

    def __init__(self, problem: str, remedy: str = "mend it") -> None:
        super().__init__(problem)
        self.problem, self.remedy = problem, remedy


def get_record(row: ParsedRow) -> Mapping[str, Any]:
    """Return the record of a row that has one."""
    if row.problem:
        raise BadRowError(row.problem)
    return row.record


@dataclass(frozen=True)
class SkippedRows:
    """Rows that were left out: how many, and where and why the first."""

    num_rows: int
    first: str

    @property
    def summary(self) -> str:
        return f"{self.num_rows:,} bad row{'' if self.num_rows == 1 else 's'}"


OnSkipped = Callable[[SkippedRows], None]


def log_skipped_rows(skipped: SkippedRows) -> None:
    """Say in the log that rows were left out."""
    logging.getLogger("stretto").warning("left out %s, the first: %s", skipped.summary, skipped.first)


@dataclass
class BadRows:
    """The bad rows of a part: the first is refused, or all are counted."""

    part: RecordPart
    policy: BadRowPolicy
    num_rows: int = 0
    first: str = ""

    def add(self, row_index: int, bad: BadRowError) -> None:
        if not self.num_rows:
            self.first = f"{self.part.path}, row {self.part.row_number(row_index):,}: {bad.problem}"
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
class RecordParser:
    """How a record becomes a sequence: which fields, and what they hold."""

    sequence: str
    value_type: ValueType
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
            raise BadRowError(f"{self.sequence!r} is {shorten(value)}, not text")
        if not value or (self.level == "word" and value.isspace() and not split_symbols(value, "word")):
            raise BadRowError(f"{self.sequence!r} is empty")
        _check_text(value, self.sequence)
        return value

    def steps(self, record: Mapping[str, Any], is_csv: bool) -> NDArray[Any]:
        """Return a record's tokens [steps] or channels [steps, channels]."""
        value = _take_list(record, self.sequence, is_csv)
        return self._tokens(value) if self.value_type == "tokens" else self._channels(value)

    def label_name(self, record: Mapping[str, Any]) -> str | None:
        """Return the name of a record's class."""
        if self.label is None:
            return None
        value = _take(record, self.label)
        # Where some labels are missing, others become floats in a table.
        if isinstance(value, float | Decimal) and math.isfinite(value) and value == int(value):
            value = int(value)
        if not isinstance(value, str | int) or value == "":
            raise BadRowError(f"{self.label!r} is {shorten(value)}, not a label: text or a whole number")
        name = shorten(value) if isinstance(value, bool) else str(value)
        _check_text(name, self.label)
        if self.classes is not None and name not in self.classes:
            raise BadRowError(
                f"{self.label!r} is {shorten(value)}, which is none of the {len(self.classes)} classes of --like"
            )
        return name

    def _tokens(self, value: list[Any]) -> NDArray[np.int64]:
        _check_types(value, {int}, self.sequence, "a whole number")
        limit = _MAX_TOKENS if self.num_tokens is None else self.num_tokens
        if min(value) < 0:
            raise BadRowError(f"{self.sequence!r} has token {min(value)}, which is negative")
        if max(value) >= limit:
            raise BadRowError(f"{self.sequence!r} has token {max(value)}, but there are only {limit:,} (from 0)")
        return np.array(value, np.int64)

    def _channels(self, value: list[Any]) -> NDArray[np.float64]:
        if self.num_channels is None:
            return _to_numbers(value, self.sequence, self.nan)[:, None]
        _check_types(value, {list}, self.sequence, "a list of numbers")
        lengths = set(map(len, value))
        if lengths != {self.num_channels}:
            found = next(len(step) for step in value if len(step) != self.num_channels)
            raise BadRowError(f"{self.sequence!r} has a step of {found} numbers where others have {self.num_channels}")
        numbers = list(chain.from_iterable(value))
        return _to_numbers(numbers, self.sequence, self.nan).reshape(-1, self.num_channels)


def to_number(value: object, name: str, nan: NanPolicy, is_csv: bool = False) -> float:
    """Return a number that a 32-bit float has room for, NaN if it is missing."""
    number = parse_number(value, is_csv)
    if number is None:
        raise BadRowError(f"{name!r} has {shorten(value)}, not a number")
    if not math.isfinite(number) and not _is_missing(value, is_csv):
        if nan == "refuse":
            raise BadRowError(
                f"{name!r} has a NaN or an infinity", "mend it, take it for a missing value with --nan missing"
            )
        number = math.nan
    if abs(number) > FLOAT32_MAX:
        raise BadRowError(f"{name!r} has a number that is too large for 32-bit floats", "scale it")
    return number


def parse_number(value: object, is_csv: bool) -> float | None:
    """Return the number that a value or a cell of CSV is, NaN if it is missing; nothing, if it is no number."""
    if _is_missing(value, is_csv) or (is_csv and isinstance(value, str) and value.strip().lower() in _NA_VALUES):
        return math.nan
    if not isinstance(value, str if is_csv else int | float | Decimal) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except ValueError:
        return None
    except OverflowError:
        return 2 * FLOAT32_MAX


def _is_missing(value: object, is_csv: bool) -> bool:
    return value is None or (is_csv and isinstance(value, str) and not value.strip())


def _to_numbers(value: list[Any], name: str, nan: NanPolicy) -> NDArray[np.float64]:
    _check_types(value, _NUMBERS, name, "a number")
    try:
        numbers = np.array(value, np.float64)
        # Where all are ordinary or missing, asking them all at once is enough.
        if np.count_nonzero(~(np.abs(numbers) <= FLOAT32_MAX)) == value.count(None):
            return numbers
    except OverflowError:
        pass
    return np.array([to_number(number, name, nan) for number in value])


def infer_parser(
    record: Mapping[str, Any], is_csv: bool, sequence: str | None, value_type: ValueType | None
) -> RecordParser:
    """Return how records like this one are to be read."""
    names = ("text", "tokens", "values") if sequence is None else (sequence,)
    name = next((name for name in names if record.get(name) is not None), None)
    if name is None:
        asked = "none of 'text', 'tokens' and 'values'" if sequence is None else f"no {sequence!r}"
        raise BadRowError(f"it has {asked}, only {sorted(record)}", "name the field with --sequence")
    if value_type is None and name in ("tokens", "values"):
        value_type = "tokens" if name == "tokens" else "channels"
    value = record[name]
    if value_type is None:
        value_type = "text" if isinstance(value, str) else _list_type(_take_list(record, name, is_csv), name)
    if value_type != "channels":
        return RecordParser(name, value_type)
    steps = _take_list(record, name, is_csv)
    return RecordParser(name, value_type, num_channels=len(steps[0]) if isinstance(steps[0], list) else None)


def sort_names(names: set[str]) -> list[str]:
    """Return the names of classes in order: whole numbers by value, anything else as text."""
    is_numeric = all(name.removeprefix("-").isascii() and name.removeprefix("-").isdigit() for name in names)
    return sorted(names, key=lambda name: (int(name), name)) if is_numeric else sorted(names)


def infer_list_type(name: str, kinds: set[type]) -> ValueType | None:
    """Return what lists in a field with steps of these types hold, if it is something to learn from."""
    if kinds == {int} and name != "values":
        return "tokens"
    return "channels" if kinds == {list} or (kinds and kinds <= _NUMBERS) else None


def _list_type(value: list[Any], name: str) -> ValueType:
    found = infer_list_type(name, set(map(type, value)))
    if found is None:
        raise BadRowError(f"{name!r} is {shorten(value)}, which is neither text nor a list of numbers")
    return found


def _take(record: Mapping[str, Any], name: str) -> object:
    value = record.get(name)
    if value is None:
        raise missing_field(record, name)
    return value


def missing_field(record: Mapping[str, Any], name: str) -> BadRowError:
    """Return what is bad about a row without a field: it has other fields, or no value in this one."""
    if name in record:
        return BadRowError(f"{name!r} is empty")
    return BadRowError(f"it has no {name!r}, only {shorten(list(record))}")


def _take_list(record: Mapping[str, Any], name: str, is_csv: bool) -> list[Any]:
    value = _take(record, name)
    if is_csv and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadRowError(f"{name!r} is {shorten(value)}, not a list as JSON has it") from None
    if not isinstance(value, list):
        raise BadRowError(f"{name!r} is {shorten(value)}, not a list")
    if not value:
        raise BadRowError(f"{name!r} is a sequence of no steps")
    return value


def _check_types(value: list[Any], kinds: set[type], name: str, wanted: str) -> None:
    # Asked of all types at once, without a loop of ours: a sequence may have a million steps.
    if not set(map(type, value)) <= kinds:
        found = next(step for step in value if type(step) not in kinds)
        raise BadRowError(f"{name!r} has {shorten(found)}, not {wanted}")


def _check_text(value: str, name: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRowError(f"{name!r} has half of a surrogate pair, which is not UTF-8") from None
