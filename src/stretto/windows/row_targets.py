"""RowTargets: the targets of rows in memory, their kind, and the tensors that a loss reads."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.base.errors import DataError
from stretto.base.task import TARGET_KINDS, TargetKind, has_classes, is_per_row
from stretto.base.window import IGNORE_INDEX
from stretto.windows.items import pad
from stretto.windows.row_arrays import Array, RowArrays

_STEP_KINDS = ("class_per_step", "values_per_step")


@dataclass(frozen=True)
class RowTargets:
    """Targets of a known kind: per row or per time step, classes or values."""

    rows: RowArrays
    kind: TargetKind
    num_outputs: int
    names: tuple[str, ...] = ()  # of the classes, if they have names

    def read(self, indices: Sequence[int], lengths: Sequence[int], num_steps: int) -> Tensor:
        """Return the targets of some rows, `[time, batch]` or `[time, batch, values]`."""
        arrays = [encode_targets(self.kind, self.rows[index], self.names) for index in indices]
        return targets_tensor(self.kind, arrays, lengths, num_steps)


def targets_tensor(kind: TargetKind, rows: Sequence[Array], lengths: Sequence[int], num_steps: int) -> Tensor:
    """Return targets `[time, batch]` or `[time, batch, values]`; those per row are at the row's last time step."""
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


def encode_targets(kind: TargetKind, row: Array, names: tuple[str, ...] = ()) -> Array:
    """Return a row's targets: classes as integers, IGNORE_INDEX where missing; values as floats with a last dim."""
    if kind == "values_per_row":
        return _as_floats(np.atleast_1d(row))
    if not has_classes(kind):
        return _as_floats(row.reshape(len(row), -1))
    if names:
        return np.searchsorted(np.array(names), row.astype(str))
    if row.dtype.kind != "f":
        return row.astype(np.int64)
    return np.where(np.isnan(row), IGNORE_INDEX, row).astype(np.int64)


def _as_floats(row: Array) -> Array:
    return row.astype(np.result_type(row.dtype, np.float32), copy=False)


def find_targets(
    targets: RowArrays, steps: NDArray[np.int64], kind: TargetKind | None, classes: int | Sequence[str] | None
) -> RowTargets:
    """Return targets with their kind, which follows from shape and dtype if it is not given.

    `steps` is the number of time steps that each row has, padding included.
    """
    if kind is None:
        kind = find_target_kind(targets, steps)
    check_kind(kind)
    names = () if classes is None or isinstance(classes, int) else tuple(sorted(map(str, classes)))
    check_step_sizes(targets, steps, kind)
    _check_dims(targets, kind)
    if not has_classes(kind):
        _check_values(targets)
        width = targets[0].shape[-1] if targets.ndim == (1 if kind == "values_per_row" else 2) else 1
        return RowTargets(targets, kind, width)
    if targets.dtype.kind in "US" or targets.dtype == object:
        names = _check_names(targets, names)
        return RowTargets(targets, kind, len(names), names)
    num_classes = classes if isinstance(classes, int) else len(names) or None
    return RowTargets(targets, kind, count_classes(targets.parts(), "targets", num_classes))


def check_step_sizes(targets: RowArrays, steps: NDArray[np.int64], kind: TargetKind) -> None:
    """Raise if targets of each time step are not as many as the time steps."""
    if kind in _STEP_KINDS and not np.array_equal(targets.sizes, steps):
        index = int(np.flatnonzero(targets.sizes != steps)[0])
        raise DataError(
            f"targets[{index}] has {targets.sizes[index]} time steps, but inputs[{index}] has {steps[index]}; give a "
            "target per time step, with NaN or -100 where there is none"
        )


def check_kind(kind: TargetKind) -> None:
    """Raise unless rows in memory can have targets of this kind."""
    choices = [name for name in TARGET_KINDS if name not in ("next_token", "horizon")]
    if kind not in choices:
        raise DataError(f"target_kind={kind!r} is not possible with targets; choose from {', '.join(choices)}")


def find_target_kind(targets: RowArrays, steps: NDArray[np.int64]) -> TargetKind:
    """Return the kind of targets that follows from their shape and dtype; raise if that is ambiguous."""
    is_value = targets.dtype.kind == "f"
    if targets.ndim == 0:
        return "values_per_row" if is_value else "class_per_row"
    if targets.ndim > 1:
        return "values_per_step"
    is_per_step = np.array_equal(targets.sizes, steps)
    if is_per_step and not is_value:
        return "class_per_step"
    if is_value and not is_per_step:
        return "values_per_row"
    what = f"{targets.sizes[0]} {'floats' if is_value else 'integers'} per row"
    choices = "values_per_row or values_per_step" if is_per_step else "values_per_row or class_per_step"
    raise DataError(
        f"targets are {what}, and inputs have {steps[0]} time steps, which could mean {choices}; set target_kind"
    )


def count_classes(parts: Iterable[tuple[int, Array]], name: str, num_classes: int | None) -> int:
    """Return `num_classes`, or else the largest class plus 1; raise if a class is out of range or not an integer."""
    largest = -1
    for index, part in parts:
        is_given = ~np.isnan(part) if part.dtype.kind == "f" else part != IGNORE_INDEX
        given = part[is_given]
        if not given.size:
            continue
        if part.dtype.kind == "f" and (given != np.floor(given)).any():
            raise DataError(f"{name} has {given[given != np.floor(given)][0]}, which is not a class; use whole numbers")
        if given.min() < 0:
            raise DataError(
                f"{name} has {given.min()} at or after row {index}; count classes from 0, and use {IGNORE_INDEX} where "
                "there is none"
            )
        largest = max(largest, int(given.max()))
    if num_classes is not None and largest >= num_classes:
        raise DataError(f"{name} has {largest}, but there are only {num_classes} classes, counted from 0")
    if largest < 0 and num_classes is None:
        raise DataError(f"{name} has no class in any row; use other targets, or set classes")
    return largest + 1 if num_classes is None else num_classes


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
                raise DataError(f"targets are infinite at or after row {index}; use NaN where a value is missing")


def _check_names(targets: RowArrays, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of all classes, sorted; raise if there is another one than those given."""
    actual = sorted({str(name) for _, part in targets.parts() for name in np.unique(part.astype(str))})
    return sorted_names(actual, names) if names else tuple(actual)


def sorted_names(actual: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the classes, sorted; raise if another one occurs."""
    unknown = [name for name in actual if name not in names]
    if unknown:
        raise DataError(f"targets have the class {unknown[0]!r}, which is not one of classes={list(names)}; add it")
    return tuple(sorted(names))
