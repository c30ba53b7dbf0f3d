"""RowTargets: the targets of rows in memory, their kind, and the tensors that a loss reads."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.base.errors import DataError
from stretto.base.task import GIVEN_TARGET_KINDS, TargetKind, has_classes, has_own_length, is_per_row, is_per_step
from stretto.base.window import IGNORE_INDEX
from stretto.windows.items import pad
from stretto.windows.row_arrays import Array, RowArrays
from stretto.windows.target_classes import TargetClasses, holds_text, plain_targets
from stretto.windows.target_symbols import find_symbols


@dataclass(frozen=True)
class RowTargets:
    """Targets of a known kind: per row or per time step, classes or values; or a sequence of classes per row."""

    rows: RowArrays  # classes are integers, -100 where there is none
    kind: TargetKind
    num_outputs: int
    classes: TargetClasses | None = None  # None: values

    def read(self, indices: Sequence[int], lengths: Sequence[int], num_steps: int) -> Tensor:
        """Return the targets of some rows, `[time, batch]` or `[time, batch, values]`."""
        arrays = [self.rows[index] for index in indices]
        if self.classes is None:
            arrays = [_as_values(self.kind, row) for row in arrays]
        return targets_tensor(self.kind, arrays, lengths, num_steps)


def targets_tensor(kind: TargetKind, rows: Sequence[Array], lengths: Sequence[int], num_steps: int) -> Tensor:
    """Return targets `[time, batch]` or `[time, batch, values]`; those per row are at the row's last time step.

    Targets with a length of their own are `[longest, batch]`, padded.
    """
    if has_own_length(kind):
        symbols = [row[row != IGNORE_INDEX] for row in rows]
        return pad(symbols, max([1, *map(len, symbols)]), IGNORE_INDEX)
    if not is_per_row(kind):
        steps = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        return pad(steps, num_steps, IGNORE_INDEX if has_classes(kind) else np.nan)
    values = torch.from_numpy(np.stack(rows))
    if has_classes(kind):
        values = values.long()
    elif values.dtype != torch.float64:
        values = values.float()
    targets = values.new_full((num_steps, *values.shape), IGNORE_INDEX if has_classes(kind) else torch.nan)
    targets[torch.tensor(lengths) - 1, torch.arange(len(rows))] = values
    return targets


def encode_targets(kind: TargetKind, row: Array, classes: TargetClasses | None = None, index: int = 0) -> Array:
    """Return targets of row `index`: classes as integers, -100 where missing; values as floats with a last dim."""
    row = plain_targets(row, kind)
    if classes is None:
        return _as_values(kind, row)
    classes.check(row[None], index)
    return classes.encode(row)


def _as_values(kind: TargetKind, row: Array) -> Array:
    """Return values as floats `[values]` or `[time, values]`."""
    values = np.atleast_1d(row) if kind == "values_per_row" else row.reshape(len(row), -1)
    return values.astype(np.result_type(values.dtype, np.float32), copy=False)


def find_targets(
    targets: RowArrays, steps: NDArray[np.int64], kind: TargetKind | None, classes: int | Sequence[str] | None
) -> RowTargets:
    """Return targets with their kind, which follows from shape and dtype if it is not given.

    `steps` is the number of time steps that each row has, padding included.
    """
    targets = targets.map(lambda part: plain_targets(part, kind))
    kind = kind or find_target_kind(targets, steps)
    check_kind(kind)
    if has_own_length(kind):
        symbols, symbol_classes = find_symbols(targets, classes)
        return RowTargets(symbols, kind, symbol_classes.number, symbol_classes)
    check_step_sizes(targets, steps, kind)
    _check_dims(targets, kind)
    if not has_classes(kind):
        _check_values(targets)
        width = targets[0].shape[-1] if targets.ndim == (1 if kind == "values_per_row" else 2) else 1
        return RowTargets(targets, kind, width)
    if classes is None:
        target_classes = TargetClasses.find(targets.parts(), holds_text(targets.dtype))
    else:
        target_classes = TargetClasses.of(classes, holds_text(targets.dtype))
        for index, part in targets.parts():
            target_classes.check(part, index)
    if targets.dtype.kind not in "iu":  # text, floats and booleans; integers are used without a copy
        targets = targets.map(target_classes.encode)
    return RowTargets(targets, kind, target_classes.number, target_classes)


def check_step_sizes(targets: RowArrays, steps: NDArray[np.int64], kind: TargetKind) -> None:
    """Raise if targets of each time step are not as many as the time steps."""
    if is_per_step(kind) and not np.array_equal(targets.sizes, steps):
        index = int(np.flatnonzero(targets.sizes != steps)[0])
        raise DataError(
            f"targets[{index}] has {targets.sizes[index]} time steps, but inputs[{index}] has {steps[index]}; give a "
            "target per time step, with NaN or -100 where there is none"
        )


def check_kind(kind: TargetKind, possible: Sequence[TargetKind] = GIVEN_TARGET_KINDS) -> None:
    """Raise unless rows in memory can have targets of this kind."""
    if kind not in possible:
        choices = ", ".join(possible)
        raise DataError(f"target_kind={kind!r} is not possible with these targets; choose from {choices}")


def find_target_kind(targets: RowArrays, steps: NDArray[np.int64]) -> TargetKind:
    """Return the kind of targets that follows from their shape and dtype; raise if that is ambiguous."""
    is_value = targets.dtype.kind == "f"
    if targets.ndim == 0:
        return "values_per_row" if is_value else "class_per_row"
    if targets.ndim > 1:
        return "values_per_step"
    has_step_sizes = np.array_equal(targets.sizes, steps)
    if has_step_sizes and not is_value:
        return "class_per_step"
    if is_value and not has_step_sizes:
        return "values_per_row"
    if holds_text(targets.dtype):
        raise DataError(
            f"targets are lists of texts, {targets.sizes[0]} in row 0, whose inputs have {steps[0]} time steps; set "
            "target_kind='sequence_per_row' if they are sequences with lengths of their own, else give a text per "
            "time step"
        )
    what = f"{targets.sizes[0]} {'floats' if is_value else 'integers'} per row"
    choices = "values_per_row or values_per_step" if has_step_sizes else "values_per_row or sequence_per_row"
    raise DataError(
        f"targets are {what}, and inputs have {steps[0]} time steps, which could mean {choices}; set target_kind"
    )


def _check_dims(targets: RowArrays, kind: TargetKind) -> None:
    dims = {"class_per_row": (0,), "values_per_row": (0, 1), "class_per_step": (1,), "values_per_step": (1, 2)}[kind]
    if targets.ndim not in dims:
        shape = ", ".join(["rows", *map(str, targets[0].shape)])
        raise DataError(f"targets [{shape}] don't have the shape of {kind}; choose a different target_kind")
    if kind == "values_per_row" and len(set(targets.sizes.tolist())) > 1:
        raise DataError("targets differ in their number of values per row; give each row the same number")


def _check_values(targets: RowArrays) -> None:
    if targets.dtype.kind not in "fiub":
        raise DataError(f"targets are of type {targets.dtype}, but values must be numbers; convert them")
    if targets.dtype.kind == "f":
        for index, part in targets.parts():
            if np.isinf(part).any():
                row = index + int(np.argwhere(np.isinf(part))[0][0])
                raise DataError(f"targets are infinite in row {row}; use NaN where a value is missing")
