"""from_table: rows from a DataFrame, an Arrow table or a Hugging Face dataset."""

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from stretto.base.errors import DataError
from stretto.base.task import TargetKind, Task, has_classes, is_per_row
from stretto.store.sequences import IntArray
from stretto.windows.arrays import ArrayItems, from_arrays
from stretto.windows.arrow_columns import ArrowColumns
from stretto.windows.row_arrays import Array, RowArrays
from stretto.windows.row_inputs import RowInputs
from stretto.windows.row_targets import RowTargets, check_kind


def from_table(
    table: object,
    inputs: str | Sequence[str],
    targets: str | Sequence[str] = (),
    *,
    by: str | None = None,
    time: str | None = None,
    context: int | None = None,
    horizon: int | None = None,
    target_kind: TargetKind | None = None,
) -> ArrayItems:
    """Return rows in memory for `Batches`, from a table of pandas, polars, pyarrow or Hugging Face `datasets`.

    A table of time steps: `inputs` are columns of numbers, the channels. `by` is the column that identifies a series,
    and `time` the one to sort it by; without `by`, the table is one series. A series is a row; with `context`, each
    piece of that many time steps is. `targets` are columns, which need not be inputs: a column of integers, booleans or
    text has a class per time step, columns of floats have values per time step. If `target_kind` is per row, the last
    time step counts. With `horizon`, the targets of a time step are the next `horizon` values of the target columns, by
    default of all inputs.

    A table of sequences: `inputs` is a column of lists, and `targets` a column with a target per row, or of lists.

    Missing targets are left out of the loss; missing inputs are an error. Nothing is scaled.
    """
    columns = ArrowColumns.of(table)
    input_names = [inputs] if isinstance(inputs, str) else list(inputs)
    target_names = [targets] if isinstance(targets, str) else list(targets)
    columns.check_names([*input_names, *target_names, *(name for name in (by, time) if name is not None)])
    if not input_names:
        raise DataError("inputs name no columns; name at least one")
    if columns.is_list(input_names[0]):
        for name, value in (("by", by), ("time", time), ("context", context), ("horizon", horizon)):
            if value is not None:
                raise DataError(
                    f"{name}={value!r} is for a table of time steps, but {inputs!r} has lists; leave it out"
                )
        if len(input_names) > 1 or len(target_names) > 1:
            raise DataError("inputs and targets of a table of sequences are one column each; name one")
        target_rows = columns.rows(target_names[0]) if target_names else None
        return from_arrays(columns.rows(input_names[0]), target_rows, target_kind=target_kind)
    for name, number in (("context", context), ("horizon", horizon)):
        if number is not None and number < 1:
            raise DataError(f"{name}={number} must be at least 1")
    values = np.stack([columns.inputs(name) for name in input_names], axis=1)
    series = _find_series(columns, by, time)
    pieces = series if context is None else [p for s in series for p in np.split(s, range(context, len(s), context))]
    if horizon is not None:
        if target_kind not in (None, "horizon"):
            raise DataError(f"target_kind={target_kind!r} can't be combined with horizon={horizon}; leave out one")
        names = target_names or input_names
        future = _future(np.stack([columns.numbers(name) for name in names], axis=1), series, horizon)
        task = Task("channels", len(input_names), "horizon", future.shape[1])
        target_arrays = RowArrays.of([future[piece] for piece in pieces], "targets")
        row_targets = RowTargets(target_arrays, "horizon", future.shape[1])
        return ArrayItems(RowInputs.of([values[piece] for piece in pieces]), task, row_targets)
    if not target_names:
        raise DataError("targets are missing; name their columns, or set horizon to forecast the inputs")
    if target_kind is None:
        is_class = len(target_names) == 1 and not columns.is_float(target_names[0])
        target_kind = "class_per_step" if is_class else "values_per_step"
    check_kind(target_kind)
    steps = _target_steps(columns, target_names, target_kind)
    per_piece = [steps[piece[-1]] if is_per_row(target_kind) else steps[piece] for piece in pieces]
    return from_arrays([values[piece] for piece in pieces], per_piece, target_kind=target_kind)


def _find_series(columns: ArrowColumns, by: str | None, time: str | None) -> list[IntArray]:
    """Return the indices of each series' time steps in the table, in order of time."""
    codes = np.zeros(len(columns), np.int64) if by is None else columns.codes(by)
    keys = [codes] if time is None else [columns.times(time), codes]
    order = np.lexsort(keys)  # stable, so that without `time` the table's order is kept
    starts = np.flatnonzero(np.diff(codes[order])) + 1
    return np.split(order, starts)


def _target_steps(columns: ArrowColumns, names: list[str], kind: TargetKind) -> Array:
    """Return the targets of each time step of the table: `[steps]` of classes, or `[steps, values]`."""
    if not has_classes(kind):
        return np.stack([columns.numbers(name) for name in names], axis=1)
    if len(names) > 1:
        raise DataError(f"targets={names} are several columns, but {kind} needs one; name one")
    return columns.classes(names[0])


def _future(values: Array, series: list[IntArray], horizon: int) -> Array:
    """Return the next `horizon` values of each time step, `[steps, horizon * values]`; NaN after a series' end."""
    future = np.full((len(values), horizon * values.shape[1]), np.nan, values.dtype)
    for steps in series:
        padded = np.concatenate([values[steps][1:], np.full((horizon, values.shape[1]), np.nan, values.dtype)])
        windows = sliding_window_view(padded, horizon, axis=0)  # [time, values, horizon]
        future[steps] = windows.transpose(0, 2, 1).reshape(len(steps), -1)
    return future
