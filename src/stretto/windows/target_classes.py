"""TargetClasses: the classes of targets, as integers or text, and which targets are missing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import DataError
from stretto.base.task import TargetKind, has_classes
from stretto.base.window import IGNORE_INDEX
from stretto.windows.row_arrays import Array

_MISSING_OBJECTS = {"None", "nan", "<NA>"}  # None, NaN and pandas.NA as text: NA can't be compared


@dataclass(frozen=True)
class TargetClasses:
    """The classes that targets may have: integers that count from 0, or text that is one of the sorted names."""

    number: int
    names: tuple[str, ...] = ()  # may be empty if targets are integers
    is_text: bool = False

    @classmethod
    def of(cls, classes: int | Sequence[str], is_text: bool) -> "TargetClasses":
        """Return the classes that a user gave. Integers index the names in the user's order."""
        if not isinstance(classes, int):
            names = tuple(map(str, classes))
            return cls(len(names), tuple(sorted(names)) if is_text else names, is_text)
        if is_text:
            raise DataError(f"classes={classes} is a number, but targets are text; give the names of all classes")
        return cls(classes)

    @classmethod
    def find(cls, parts: Iterable[tuple[int, Array]], is_text: bool) -> "TargetClasses":
        """Return the classes that occur."""
        if not is_text:
            return cls(count_classes(parts, "targets", None))
        names = sorted({str(name) for _, part in parts for name in given_names(part)})
        if not names:
            raise DataError("targets has no class in any row; use other targets, or set classes")
        return cls(len(names), tuple(names), is_text)

    def check(self, part: Array, index: int) -> None:
        """Raise if a class is not one of these; `index` is the first row of `part`, whose first dim is the rows."""
        if self.is_text:
            for name in given_names(part).tolist():
                self.check_names([name], f" in row {index + _first_row(part.astype(str) == name)}")
        else:
            count_classes([(index, part)], "targets", self.number)

    def check_names(self, names: Sequence[str], where: str) -> None:
        """Raise if a text is not the name of a class."""
        for name in names:
            if name not in self.names:
                raise DataError(
                    f"targets have the class {name!r}{where}, which is not one of classes={list(self.names)}; add it"
                )

    def encode(self, row: Array) -> NDArray[np.int64]:
        """Return classes, which `check` has accepted, as integers, IGNORE_INDEX where there is none."""
        codes = np.searchsorted(np.array(self.names), row.astype(str)) if self.is_text else row
        return np.where(is_missing(row), IGNORE_INDEX, codes).astype(np.int64)


def is_missing(part: Array) -> NDArray[np.bool_]:
    """Return where there is no class: -100, NaN or None."""
    if part.dtype == object:
        missing = [not isinstance(value, str) and str(value) in _MISSING_OBJECTS for value in part.flat]
        return np.array(missing, bool).reshape(part.shape)
    if part.dtype.kind in "US":
        return np.zeros(part.shape, bool)
    return np.asarray((part == IGNORE_INDEX) | (part != part))  # NaN is unequal to itself


def given_names(part: Array) -> Array:
    """Return the different texts, without missing ones."""
    return np.unique(part[~is_missing(part)].astype(str))


def holds_text(dtype: "np.dtype[np.generic]") -> bool:
    """Whether targets of a dtype are text, after `plain_targets`."""
    return dtype.kind in "USO"


def plain_targets(part: Array, kind: TargetKind | None) -> Array:
    """Return objects that are numbers as an array of numbers, with -100 or NaN where there is none."""
    if part.dtype != object:
        return part
    missing = is_missing(part)
    given = part[~missing].tolist()
    if not all(isinstance(value, Real | np.bool_) for value in given):
        return part
    are_classes = kind is None or has_classes(kind)
    if given and are_classes and all(isinstance(value, Integral | np.bool_) for value in given):
        return np.where(missing, IGNORE_INDEX, part).astype(np.int64)
    return np.where(missing, np.nan, part).astype(np.float64)


def _first_row(is_wrong: NDArray[np.bool_]) -> int:
    return int(np.argwhere(is_wrong)[0][0])


def count_classes(
    parts: Iterable[tuple[int, Array]], name: str, num_classes: int | None, *, may_be_missing: bool = True
) -> int:
    """Return `num_classes`, or else the largest class plus 1; raise if a class is out of range or not an integer.

    Tokens are counted in the same way, but none may be missing.
    """
    largest = -1
    noun = "classes" if may_be_missing else "tokens"
    remedy = f"use {IGNORE_INDEX} where there is none" if may_be_missing else "pass lengths if rows are padded"
    for index, part in parts:
        if part.dtype.kind not in "iubf":
            raise DataError(f"{name} has {part.flat[0]!r} in row {index}; use integers in all rows, or text")
        given = part[~is_missing(part)] if may_be_missing else part
        if not given.size:
            continue
        if part.dtype.kind == "f" and (given != np.floor(given)).any():
            raise DataError(f"{name} has {given[given != np.floor(given)][0]}, which is not a class; use whole numbers")
        if given.min() < 0:
            row = index + _first_row(part == given.min())
            raise DataError(f"{name} has {given.min()} in row {row}; count {noun} from 0, and {remedy}")
        largest = max(largest, int(given.max()))
        if num_classes is not None and largest >= num_classes:
            row = index + _first_row(part == largest)
            problem = f"{name} has {largest} in row {row}"
            raise DataError(f"{problem}, but there are only {num_classes} {noun}, counted from 0")
    if largest < 0 and num_classes is None:
        raise DataError(f"{name} has no class in any row; use other targets, or set classes")
    return largest + 1 if num_classes is None else num_classes
