"""RecordParser: turns a record into a sequence."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.prepare.category_codes import Codes, to_code
from stretto.prepare.decimal_commas import to_point
from stretto.prepare.options import NanPolicy, ValueType
from stretto.prepare.records import shorten
from stretto.prepare.row_reader import BadRowError, check_text, missing_field
from stretto.store.vocabulary import Level, split_symbols

_MAX_TOKENS = 1 << 32  # tokens are stored in at most 32 bits
FLOAT32_MAX = float(np.finfo(np.float32).max)
# What programs write into a CSV cell that has no number; float() itself reads "nan" as NaN.
_NA_VALUES = {"na", "n/a", "#n/a", "null", "none"}
_NUMBER_TYPES = {int, float, Decimal, type(None)}  # None is a missing value


@dataclass(frozen=True)
class RecordParser:
    """Parses records into sequences, which are in the field `sequence`, or a channel in each of the fields `inputs`."""

    sequence: str
    value_type: ValueType
    inputs: tuple[str, ...] = ()  # empty: all channels are in `sequence`
    level: Level = "byte"  # how text is split into tokens
    has_words: bool = False  # a text is given as the list of its words
    num_tokens: int | None = None  # the vocabulary size; None: not known yet, or not tokens
    num_channels: int | None = None  # length of a step's list; None: a step is a plain number
    nan: NanPolicy = "error"
    categories: Mapping[str, Codes] = field(default_factory=dict)  # the codes of those of `inputs` that hold texts

    @property
    def fields(self) -> list[str]:
        return list(self.inputs) or [self.sequence]

    @property
    def channel_names(self) -> list[str]:
        if self.num_channels is None:
            return self.fields
        return [f"{self.sequence}.{number}" for number in range(self.num_channels)]

    def parse(self, record: Mapping[str, Any], is_csv: bool) -> Any:  # noqa: ANN401 - see the docstring
        """Return a record's text, tokens `[steps]` or channels `[steps, channels]`."""
        if self.value_type == "text":
            return self._text(record, is_csv)
        if self.inputs:
            return self._columns(record, is_csv)
        steps = require_list(record, self.sequence, is_csv)
        return self._tokens(steps) if self.value_type == "tokens" else self._channels(steps)

    def count_steps(self, value: Any) -> int:  # noqa: ANN401 - what `parse` returns
        """Return the number of time steps of a parsed sequence."""
        if self.value_type != "text":
            return len(value)
        return len(value.encode()) if self.level == "byte" else len(split_symbols(value, self.level))

    def find_num_steps(self, record: Mapping[str, Any], is_csv: bool) -> int | None:
        """Return the number of time steps of a record's sequence, which is not checked; None if there is none."""
        try:
            if self.value_type == "text":
                return self.count_steps(self._text(record, is_csv))
            # A text of the whole sequence has no time steps.
            lists = [name for name in self.fields if name not in self.categories or as_list(record.get(name), is_csv)]
            return len(require_list(record, (lists or self.fields)[0], is_csv))
        except BadRowError:
            return None

    def _text(self, record: Mapping[str, Any], is_csv: bool) -> str:
        if self.has_words:
            return self._joined_words(require_list(record, self.sequence, is_csv))
        value = require(record, self.sequence)
        if not isinstance(value, str):
            raise BadRowError(f"{self.sequence!r} is {shorten(value)}, not text")
        if self.level == "word" and value.isspace() and not split_symbols(value, "word"):  # a line end is a word
            raise BadRowError(f"{self.sequence!r} has no words, only white space")
        check_text(value, self.sequence)
        return value

    def _joined_words(self, words: list[Any]) -> str:
        check_types(words, {str}, self.sequence, "a word")
        for word in words:
            if word.split() != [word]:
                problem = f"{self.sequence!r} has {shorten(word)}, but a word is not empty and has no white space"
                raise BadRowError(problem, "replace white space in it, as by _")
        text = " ".join(words)
        check_text(text, self.sequence)
        return text

    def _tokens(self, steps: list[Any]) -> NDArray[np.int64]:
        check_types(steps, {int}, self.sequence, "an integer")
        limit = _MAX_TOKENS if self.num_tokens is None else self.num_tokens
        if min(steps) < 0:
            problem = f"{self.sequence!r} has token {min(steps)}, which is negative"
            raise BadRowError(problem, "read the integers as numbers with read_as=channels")
        if max(steps) >= limit:
            raise BadRowError(f"{self.sequence!r} has token {max(steps)}, but tokens must be below {limit:,}")
        return np.array(steps, np.int64)

    def _columns(self, record: Mapping[str, Any], is_csv: bool) -> NDArray[np.float64]:
        columns = {name: self._column(record, name, is_csv) for name in self.inputs}
        # A text of the whole sequence has no dim; it is repeated at each time step.
        sizes = {name: len(column) for name, column in columns.items() if column.ndim} or {self.inputs[0]: 1}
        first, num_steps = next(iter(sizes.items()))
        for name, size in sizes.items():
            if size != num_steps:
                problem = f"{name!r} has {size} time steps, but {first!r} has {num_steps}"
                raise BadRowError(problem, "make them equal")
        return np.stack([np.broadcast_to(column, num_steps) for column in columns.values()], axis=1)

    def _column(self, record: Mapping[str, Any], name: str, is_csv: bool) -> NDArray[np.float64]:
        """Return the numbers or codes of a field `[steps]`; a scalar if it has one text for all time steps."""
        codes = self.categories.get(name)
        if codes is None:
            return to_numbers(require_list(record, name, is_csv), name, self.nan)
        if name not in record:
            raise missing_field(record, name)
        texts = as_list(record[name], is_csv)
        if texts is None:
            return np.array(to_code(record[name], name, codes))
        return np.array([to_code(text, name, codes) for text in texts])

    def _channels(self, steps: list[Any]) -> NDArray[np.float64]:
        if self.num_channels is None:
            return to_numbers(steps, self.sequence, self.nan)[:, None]
        check_types(steps, {list}, self.sequence, "a list of numbers")
        if set(map(len, steps)) != {self.num_channels}:
            length = next(len(step) for step in steps if len(step) != self.num_channels)
            problem = f"has a list of length {length} at a time step, but the data's first list has"
            raise BadRowError(f"{self.sequence!r} {problem} length {self.num_channels}")
        flat = list(chain.from_iterable(steps))
        return to_numbers(flat, self.sequence, self.nan).reshape(-1, self.num_channels)


def to_number(value: object, name: str, nan: NanPolicy, is_csv: bool = False) -> float:
    """Return a value as a number, NaN if missing. Reject numbers beyond float32 and, if nan=error, NaN and infinity."""
    number = parse_number(value, is_csv)
    if number is None:
        raise BadRowError(f"{name!r} has {shorten(value)}, not a number")
    if not math.isfinite(number) and not _is_missing(value, is_csv):
        if nan == "error":
            # RowReader appends ", or skip such rows with bad_rows=skip".
            raise BadRowError(f"{name!r} has NaN, NA or an infinity", "fix it, read it as missing with nan=missing")
        number = math.nan
    if abs(number) > FLOAT32_MAX:
        raise BadRowError(f"{name!r} has a number that is too large for 32-bit floats", "scale it")
    return number


def parse_number(value: object, is_csv: bool) -> float | None:
    """Return the number in a value, or in the text of a CSV cell: NaN if it is missing or NA, None if not a number."""
    if _is_missing(value, is_csv) or (is_csv and isinstance(value, str) and value.strip().lower() in _NA_VALUES):
        return math.nan
    if not isinstance(value, str if is_csv else int | float | Decimal) or isinstance(value, bool):
        return None
    try:
        return float(to_point(value) if isinstance(value, str) else value)
    except ValueError:
        return None
    except OverflowError:
        return 2 * FLOAT32_MAX  # an integer too large for any float: `to_number` rejects it


def _is_missing(value: object, is_csv: bool) -> bool:
    return value is None or (is_csv and isinstance(value, str) and not value.strip())


def to_numbers(values: list[Any], name: str, nan: NanPolicy) -> NDArray[np.float64]:
    """Return what `to_number` returns for each value, but without a Python loop if possible."""
    check_types(values, _NUMBER_TYPES, name, "a number")
    try:
        numbers = np.array(values, np.float64)
        # `<=` is false for NaN, infinity and too large numbers. If only the Nones (NaN now) fail, the array is fine.
        num_others = np.count_nonzero(~(np.abs(numbers) <= FLOAT32_MAX))
        if not num_others or num_others == values.count(None):
            return numbers
    except OverflowError:
        pass
    return np.array([to_number(value, name, nan) for value in values])


def infer_parser(
    record: Mapping[str, Any], is_csv: bool, sequence: str | None, value_type: ValueType | None
) -> RecordParser:
    """Return a parser for records like this one; `sequence` and `value_type` are inferred if None."""
    names = ("inputs", "text", "tokens", "values") if sequence is None else (sequence,)
    name = next((name for name in names if record.get(name) is not None), None)
    if name is None:
        expected = "'inputs', 'text', 'tokens' or 'values'" if sequence is None else repr(sequence)
        problem = f"it has no value in {expected} (its fields are {sorted(record)})"
        raise BadRowError(problem, "name the field with sequence=FIELD")
    listed = as_list(record[name], is_csv)
    if value_type in (None, "text") and are_words(listed):
        return RecordParser(name, "text", level="word", has_words=True)
    if value_type is None and listed == []:
        raise BadRowError(f"{name!r} is an empty list")
    if value_type is None and name in ("tokens", "values"):
        value_type = "tokens" if name == "tokens" else "channels"
    if value_type is None and isinstance(record[name], str):
        value_type = "text"
    if value_type in ("text", "tokens"):
        return RecordParser(name, value_type)
    steps = require_list(record, name, is_csv)
    value_type = value_type or infer_list_type(name, set(map(type, steps)))
    if value_type is None:
        problem = f"{name!r} is {shorten(steps)}, which is neither text nor a list of numbers or of words"
        raise BadRowError(problem, "to read words, join them with spaces into one text and use level=word")
    is_nested = value_type == "channels" and isinstance(steps[0], list)
    if is_nested and not steps[0]:
        raise BadRowError(f"{name!r} has an empty list at a time step", "write the values of its channels")
    return RecordParser(name, value_type, num_channels=len(steps[0]) if is_nested else None)


def sort_class_names(names: set[str]) -> list[str]:
    """Return the names of classes in order: by value if all are integers, else as text."""
    is_numeric = all(name.removeprefix("-").isascii() and name.removeprefix("-").isdigit() for name in names)
    return sorted(names, key=lambda name: (int(name), name)) if is_numeric else sorted(names)


def infer_list_type(name: str, types: set[type]) -> ValueType | None:
    """Return what the lists in field `name` hold, given the types of their elements; None if they are not sequences."""
    if types == {int} and name != "values":
        return "tokens"
    return "channels" if types == {list} or (types and types <= _NUMBER_TYPES) else None


def are_words(values: list[Any] | None) -> bool:
    """Return whether this is a list of texts."""
    return bool(values) and all(isinstance(value, str) for value in values or ())


def require(record: Mapping[str, Any], name: str) -> object:
    """Return the value of a field; raise if it is missing."""
    value = record.get(name)
    if value is None or value == "":
        raise missing_field(record, name)
    return value


def require_list(record: Mapping[str, Any], name: str, is_csv: bool) -> list[Any]:
    """Return the list in a field, or the JSON list in a CSV cell; raise if there is none, or it is empty."""
    value = require(record, name)
    if is_csv and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadRowError(f"{name!r} is {shorten(value)}, not a JSON list") from None
    if not isinstance(value, list):
        raise BadRowError(f"{name!r} is {shorten(value)}, not a list")
    if not value:
        raise BadRowError(f"{name!r} is an empty list")
    return value


def as_list(value: object, is_csv: bool) -> list[Any] | None:
    """Return the value if it is a list, or the JSON list in a CSV cell; None if there is no list."""
    if is_csv and isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, list) else None


def check_types(values: list[Any], types: set[type], name: str, expected: str) -> None:
    """Raise if a value of a field is of a different type."""
    # One set of all types instead of a Python loop: a sequence may have a million steps.
    if not set(map(type, values)) <= types:
        wrong = next(value for value in values if type(value) not in types)
        raise BadRowError(f"{name!r} has {shorten(wrong)}, not {expected}")
