"""TargetParser: reads the targets of a record: a class, values, or a sequence of classes, per sequence or time step."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import DataError
from stretto.base.task import IGNORE_INDEX, TargetKind, has_classes, is_per_step
from stretto.prepare.options import NanPolicy
from stretto.prepare.record_parser import as_list, check_types, require, require_list, to_number, to_numbers
from stretto.prepare.records import shorten
from stretto.prepare.row_reader import BadRowError, check_text, missing_field

# Names of classes, one for the sequence or one per time step; or values `[1, values]` or `[time, values]`.
ParsedTargets = list[str | None] | NDArray[np.float64]


@dataclass(frozen=True)
class TargetParser:
    """Reads the targets in `fields`: one field of classes or of lists, or a field per value."""

    fields: tuple[str, ...]
    kind: TargetKind
    num_values: int | None = None  # length of the list of values in the only field; None: a field has one value
    classes: Mapping[str, int] | None = None  # None: not known yet, or the targets are values
    nan: NanPolicy = "error"
    is_label: bool = False  # named with `label`: a row in which it is null is bad

    @property
    def names(self) -> list[str]:
        """The names of the values."""
        if self.num_values is None:
            return list(self.fields)
        return [f"{self.fields[0]}.{number}" for number in range(self.num_values)]

    def parse(self, record: Mapping[str, Any], is_csv: bool, num_steps: int) -> ParsedTargets:
        """Return the targets of a record whose sequence has `num_steps` time steps; null is a missing target."""
        if self.kind == "class_per_row":
            read = require if self.is_label else self._value
            return [self._class_name(read(record, self.fields[0]), is_csv)]
        if self.kind == "class_per_step":
            classes = self._steps(record, self.fields[0], is_csv, num_steps)
            return [self._class_name(value, is_csv) for value in classes]
        if self.kind == "sequence_per_row":
            names = [self._class_name(value, is_csv) for value in self._symbols(record, is_csv)]
            return [name for name in names if name is not None]
        if self.num_values is not None:
            return self._nested_values(record, is_csv, num_steps)
        if self.kind == "values_per_row":
            return np.array([[to_number(self._value(record, name), name, self.nan, is_csv) for name in self.fields]])
        columns = [to_numbers(self._steps(record, name, is_csv, num_steps), name, self.nan) for name in self.fields]
        return np.stack(columns, axis=1)

    def encode(self, targets: ParsedTargets) -> NDArray[Any]:
        """Return the numbers of classes, -100 for those that are missing; values are returned as they are."""
        if not isinstance(targets, list):
            return targets
        assert self.classes is not None, "set by the scan"
        numbers = [IGNORE_INDEX if name is None else self.classes[name] for name in targets]
        return np.array(numbers, dtype=np.int64)

    def _class_name(self, value: object, is_csv: bool) -> str | None:
        """Return the name of a class; None if it is missing, which in arrays is -100, or NaN among floats."""
        name = self.fields[0]
        if self.nan == "missing" and isinstance(value, float) and math.isnan(value):
            return None
        # If some integer labels are missing, pandas stores the other labels as floats.
        if isinstance(value, float | Decimal) and math.isfinite(value) and value == int(value):
            value = int(value)
        if value is None or value in ("", IGNORE_INDEX) or (is_csv and value == str(IGNORE_INDEX)):
            return None
        if not isinstance(value, str | int):
            problem = f"{name!r} is {shorten(value)}, but a label must be text, an integer or a boolean"
            raise BadRowError(problem, f"predict values with targets={name}")
        class_name = json.dumps(value) if isinstance(value, bool) else str(value)  # true or false, as in JSON
        check_text(class_name, name)
        if self.classes is not None and class_name not in self.classes:
            raise BadRowError(f"{name!r} is {shorten(value)}, which is not among the classes of like=FOLDER")
        return class_name

    def _steps(self, record: Mapping[str, Any], name: str, is_csv: bool, num_steps: int) -> list[Any]:
        if self._value(record, name) in (None, ""):
            return [None] * num_steps
        steps = require_list(record, name, is_csv)
        if len(steps) != num_steps:
            problem = f"{name!r} has {len(steps)} targets, but the sequence has {num_steps} time steps"
            raise BadRowError(problem, "give one per time step; null, or NaN or -100 in arrays, is a missing one")
        return steps

    def _symbols(self, record: Mapping[str, Any], is_csv: bool) -> list[Any]:
        """Return the elements of a list, or the characters of a text; an empty list if the value is missing."""
        value = self._value(record, self.fields[0])
        symbols = as_list(value, is_csv)
        if symbols is not None:
            return symbols
        if value is not None and not isinstance(value, str):
            raise BadRowError(f"{self.fields[0]!r} is {shorten(value)}, but a sequence must be a list or a text")
        return list(value or "")

    @staticmethod
    def _value(record: Mapping[str, Any], name: str) -> object:
        if name not in record:
            raise missing_field(record, name)
        return record[name]

    def _nested_values(self, record: Mapping[str, Any], is_csv: bool, num_steps: int) -> NDArray[np.float64]:
        name = self.fields[0]
        is_step = is_per_step(self.kind)
        if is_step:
            steps = self._steps(record, name, is_csv, num_steps)
        else:
            is_missing = self._value(record, name) in (None, "")
            steps = [None if is_missing else require_list(record, name, is_csv)]
        check_types(steps, {list, type(None)}, name, "a list of numbers")
        steps = [[None] * (self.num_values or 0) if values is None else values for values in steps]
        for values in steps:
            if not values:
                raise BadRowError(f"{name!r} has an empty list of values", "leave the field out, or write its values")
            if len(values) != self.num_values:
                where = "at a time step" if is_step else "in this row"
                raise BadRowError(f"{name!r} has {len(values)} values {where}, but {self.num_values} in the first row")
        return np.stack([to_numbers(values, name, self.nan) for values in steps])


def make_target_parser(
    records: Sequence[Mapping[str, Any]], fields: Sequence[str], kind: TargetKind, is_csv: bool, nan: NanPolicy
) -> TargetParser:
    """Return a parser for targets of a known kind; the number of values in a list is that of the first record."""
    parser = TargetParser(tuple(fields), kind, nan=nan)
    if has_classes(kind):
        if len(fields) > 1:
            raise DataError(f"targets={','.join(fields)} are {len(fields)} fields, but {kind} needs one; name one")
        return parser
    present = [value for record in records if (value := record.get(fields[0])) not in (None, "")]
    lists = [values for value in present[:1] if (values := as_list(value, is_csv)) is not None]
    if kind == "values_per_step":
        steps = (step for value in present for step in as_list(value, is_csv) or () if step is not None)
        lists = [step for step in islice(steps, 1) if isinstance(step, list)]
    if not lists:
        return parser
    if len(fields) > 1:
        raise DataError(f"targets={','.join(fields)}: {fields[0]!r} has lists of values; name it alone")
    return replace(parser, num_values=len(lists[0]))
