"""Targets with a length of their own: a sequence of symbols per row, such as the text of a recording."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import DataError
from stretto.base.window import IGNORE_INDEX
from stretto.windows.row_arrays import Array, RowArrays
from stretto.windows.target_classes import TargetClasses, given_names, holds_text, is_missing

BLANK_NAME = ""
"""The name of class 0, CTC's blank, which is never a target; joined names of symbols are their text."""


def join_symbols(symbols: Sequence[str], names: Sequence[str]) -> str:
    """Return symbols as a text; `names` are those of all classes. Characters are joined, words get spaces between."""
    return ("" if all(len(name) <= 1 for name in names) else " ").join(symbols)


def find_symbols(targets: RowArrays, classes: int | Sequence[str] | None) -> tuple[RowArrays, TargetClasses]:
    """Return the symbols of each row as integers from 1, without missing ones, and their classes.

    A text is a sequence of characters; text that is in lists is one symbol per element.
    """
    if targets.ndim == 0:
        if not holds_text(targets.dtype):
            raise DataError("targets are single numbers, but sequence_per_row needs a sequence or a text per row")
        targets = RowArrays([_split_text(text) for text in targets.rows], targets.name)
    target_classes = _find_classes(targets, classes)
    rows = []
    for index in range(len(targets)):
        row = targets[index]
        _check_has_blank(row, index, target_classes)
        target_classes.check(row, index)
        symbols = target_classes.encode(row)
        symbols = symbols[symbols != IGNORE_INDEX]
        if (symbols == 0).any():
            blank = repr(BLANK_NAME) if target_classes.is_text else "0"
            raise DataError(
                f"targets[{index}] has the class {blank}, which is the blank of CTC and never a target; count symbols "
                "from 1"
            )
        rows.append(symbols)
    return RowArrays(rows, targets.name), target_classes


def _check_has_blank(row: Array, index: int, classes: TargetClasses) -> None:
    """Raise if integers count from 1, but the names that they index seem to be those of symbols only."""
    if classes.is_text or not classes.names or classes.names[0] == BLANK_NAME:
        return
    if (row == classes.number).any():
        raise DataError(
            f"targets[{index}] has {classes.number}, but classes name only 0 to {classes.number - 1}, of which 0 is "
            f"the blank of CTC; put its name first: classes={[BLANK_NAME, *classes.names[:2]]} and so on"
        )


def _split_text(text: object) -> NDArray[np.str_]:
    missing = bool(is_missing(np.array([text], object))[0])
    return np.array([] if missing else list(str(text)), dtype=np.str_)


def _find_classes(targets: RowArrays, classes: int | Sequence[str] | None) -> TargetClasses:
    is_text = holds_text(targets.dtype)
    if isinstance(classes, int) or (classes is not None and not is_text):
        return TargetClasses.of(classes, is_text)
    if not is_text:
        return TargetClasses.find(targets.parts(), is_text)
    if classes is None:
        classes = [str(name) for _, part in targets.parts() for name in given_names(part)]
    names = sorted({str(name) for name in classes} - {BLANK_NAME})
    if not names:
        raise DataError("targets have no symbol in any row; use other targets, or set classes")
    return TargetClasses(len(names) + 1, (BLANK_NAME, *names), is_text)
