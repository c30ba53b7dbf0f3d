"""from_table: rows from a DataFrame, an Arrow table or a Hugging Face dataset."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from stretto.base.errors import DataError
from stretto.base.task import TABLE_TARGET_KINDS, TargetKind, Task, has_classes, is_per_row
from stretto.store.sequences import IntArray
from stretto.windows.arrays import ArrayItems, from_arrays
from stretto.windows.arrow_columns import ArrowColumns
from stretto.windows.row_arrays import Array, RowArrays
from stretto.windows.row_inputs import RowInputs
from stretto.windows.row_targets import RowTargets, check_kind
from stretto.windows.table_inputs import TableInputs


@dataclass(frozen=True)
class Horizon:
    """How many time steps to forecast, and the columns whose values over these time steps are known ahead of time."""

    steps: int
    known_future: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise DataError(f"horizon={self.steps} must be at least 1")
        if isinstance(self.known_future, str):
            object.__setattr__(self, "known_future", [self.known_future])


def from_table(
    table: object,
    inputs: str | Sequence[str],
    targets: str | Sequence[str] = (),
    *,
    by: str | None = None,
    time: str | None = None,
    horizon: int | Horizon | None = None,
    target_kind: TargetKind | None = None,
    classes: int | Sequence[str] | Mapping[str, Sequence[str]] | None = None,
) -> ArrayItems:
    """Return rows in memory for `Batches`, from a table of pandas, polars, pyarrow or Hugging Face `datasets`.

    A table of time steps: `inputs` are columns of numbers, the channels, or of at most 1,000 different texts, which
    become categories, for the block `EmbedCategories`. `by` is the column that identifies a series, and `time` the one
    to sort it by; without `by`, the table is one series. A series is a row, which `cut` of the result cuts into shorter
    ones; the rows are in the order in which series first appear (of a categorical column, in that of its categories),
    and `series_names` has their values of `by`. `targets` are columns, which need not be inputs: a column of integers,
    booleans or text has a class per time step, columns of floats have values per time step. If `target_kind` is per
    row, the last time step of a series counts. With `horizon`, the targets of a time step are the next `horizon` values
    of the target columns, by default of all inputs. `Horizon(24, known_future=["price"])` adds inputs: these columns
    and their next 24 values. Then a row ends where these are not known; to forecast, let the table continue past it.

    A table of sequences: `inputs` is a column of lists, and `targets` a column with a target per row, or of lists.

    Missing targets are left out of the loss; missing numbers in inputs are an error. Nothing is scaled. `classes` is as
    in `from_arrays`: give the names of all classes where some may not occur, as in validation data. If inputs are text,
    give a dict of names by column: `categories` of the training rows, and the classes of the target, if any.
    """
    columns = ArrowColumns.of(table)
    input_names = [inputs] if isinstance(inputs, str) else list(inputs)
    target_names = [targets] if isinstance(targets, str) else list(targets)
    horizon = Horizon(horizon) if isinstance(horizon, int) else horizon
    known_future = [] if horizon is None else list(horizon.known_future)
    columns.check_names([*input_names, *target_names, *known_future, *filter(None, (by, time))])
    if not input_names:
        raise DataError("inputs name no columns; name at least one")
    all_inputs = list(dict.fromkeys([*input_names, *known_future]))
    categories, classes = _split_classes(classes, columns, all_inputs, target_names)
    if columns.is_list(input_names[0]):
        for name, value in (("by", by), ("time", time), ("horizon", horizon)):
            if value is not None:
                raise DataError(f"{name}={value!r} is for tables of time steps, but {inputs!r} has lists; leave it out")
        return _list_items(columns, input_names, target_names, target_kind, classes)
    series = _find_series(columns, by, time)
    table_inputs = TableInputs.of(columns, all_inputs, categories)
    if horizon is not None:
        if target_kind not in (None, "horizon"):
            raise DataError(
                f"target_kind={target_kind!r} can't be combined with horizon={horizon.steps}; leave out one"
            )
        return _forecast_items(table_inputs, input_names, target_names, series, horizon, by)
    values = np.stack([table_inputs.required(name) for name in input_names], axis=1)
    target_kind = target_kind or _default_kind(columns, target_names)
    check_kind(target_kind, TABLE_TARGET_KINDS)
    table_targets = _target_steps(columns, target_names, target_kind)
    series_targets = [table_targets[steps[-1]] if is_per_row(target_kind) else table_targets[steps] for steps in series]
    items = from_arrays([values[s] for s in series], series_targets, target_kind=target_kind, classes=classes)
    return replace(_with_categories(items, table_inputs, input_names), series_names=_series_names(columns, by, series))


def _split_classes(
    classes: int | Sequence[str] | Mapping[str, Sequence[str]] | None,
    columns: ArrowColumns,
    inputs: list[str],
    targets: list[str],
) -> tuple[dict[str, Sequence[str]], int | Sequence[str] | None]:
    """Return the names of categories by input column, and the classes of the target."""
    if not isinstance(classes, Mapping):
        return {}, classes
    for name in classes:
        if name not in (*inputs, *targets):
            raise DataError(f"classes have {name!r}, which is neither an input nor a target; leave it out")
        if name in inputs and name in targets and not columns.is_text(name):
            raise DataError(
                f"classes have {name!r}, which is an input and a target, but not text; convert the column to text, or "
                "give the names of its classes as a list"
            )
    categories = {name: names for name, names in classes.items() if name in inputs}
    return categories, next((names for name, names in classes.items() if name in targets), None)


def _list_items(
    columns: ArrowColumns,
    inputs: list[str],
    targets: list[str],
    target_kind: TargetKind | None,
    classes: int | Sequence[str] | None,
) -> ArrayItems:
    """Return the rows of a table of sequences."""
    if len(inputs) > 1 or len(targets) > 1:
        raise DataError("inputs and targets of a table of sequences are one column each; name one")
    target_rows = columns.rows(targets[0]) if targets else None
    return from_arrays(columns.rows(inputs[0]), target_rows, target_kind=target_kind, classes=classes)


def _with_categories(items: ArrayItems, inputs: TableInputs, names: list[str]) -> ArrayItems:
    """Return rows that know which inputs are categories; `names` has the column of each input."""
    task = replace(items.data_task, categories=inputs.task_categories(names))
    return replace(items, data_task=task, input_categories=inputs.categories)


def _default_kind(columns: ArrowColumns, names: list[str]) -> TargetKind:
    if not names:
        raise DataError("targets are missing; name their columns, or set horizon to forecast the inputs")
    return "values_per_step" if len(names) > 1 or columns.is_float(names[0]) else "class_per_step"


def _forecast_items(
    inputs: TableInputs,
    names: list[str],
    targets: list[str],
    series: list[IntArray],
    horizon: Horizon,
    by: str | None,
) -> ArrayItems:
    """Return series whose targets at each time step are the next values of the columns `targets`."""
    known_future = list(horizon.known_future)
    targets = targets or [name for name in names if name not in known_future and name not in inputs.categories]
    if not targets or {*targets} & {*known_future}:
        raise DataError(f"known_future={known_future} leaves no target, or names one; name other targets")
    target_values = np.stack([inputs.columns.numbers(name) for name in targets], axis=1)
    future = [_future(target_values[steps], horizon.steps) for steps in series]
    if known_future:
        names = [*names, *(name for name in known_future if name not in names)]
        rows = _known_rows(inputs, names, series, horizon)
        future = [steps[: len(steps) - horizon.steps] for steps in future if len(steps) > horizon.steps]
    else:
        values = np.stack([inputs.required(name) for name in names], axis=1)
        rows = [values[steps] for steps in series]
    row_targets = RowArrays.of(future, "targets")
    row_inputs = RowInputs.of(rows)
    task = Task("channels", row_inputs.num_channels, "horizon", row_targets[0].shape[1])
    series_names = _series_names(inputs.columns, by, series, longer_than=horizon.steps if known_future else 0)
    horizon_targets = RowTargets(row_targets, "horizon", task.num_outputs)
    items = ArrayItems(row_inputs, task, horizon_targets, series_names=series_names)
    return _with_categories(items, inputs, [*names, *known_future * horizon.steps])


def _known_rows(inputs: TableInputs, names: list[str], series: list[IntArray], horizon: Horizon) -> list[Array]:
    """Return the inputs of each time step whose known future the table has: all columns, then their known future."""
    # The last time steps have no inputs of their own, so values may be missing there: `RowInputs` checks the others.
    values = np.stack([inputs.optional(name) for name in names], axis=1)
    known = np.stack([inputs.required(name) for name in horizon.known_future], axis=1)
    rows = [
        np.concatenate([values[steps], _future(known[steps], horizon.steps)], axis=1)[: len(steps) - horizon.steps]
        for steps in series
        if len(steps) > horizon.steps
    ]
    if not rows:
        raise DataError(f"no series has more than horizon={horizon.steps} time steps; use longer ones")
    return rows


def _find_series(columns: ArrowColumns, by: str | None, time: str | None) -> list[IntArray]:
    """Return the indices of each series' time steps in the table, in order of time."""
    codes = np.zeros(len(columns), np.int64) if by is None else columns.codes(by)
    keys = [codes] if time is None else [columns.times(time), codes]
    order = np.lexsort(keys)  # stable, so that without `time` the table's order is kept
    starts = np.flatnonzero(np.diff(codes[order])) + 1
    return np.split(order, starts)


def _series_names(
    columns: ArrowColumns, by: str | None, series: list[IntArray], longer_than: int = 0
) -> tuple[str, ...]:
    """Return the value of `by` for each series that is a row; those with a known future need more time steps."""
    if by is None:
        return ()
    return tuple(columns.text_at(by, int(steps[0])) for steps in series if len(steps) > longer_than)


def _target_steps(columns: ArrowColumns, names: list[str], kind: TargetKind) -> Array:
    """Return the targets of each time step of the table: `[steps]` of classes, or `[steps, values]`."""
    if not has_classes(kind):
        return np.stack([columns.numbers(name) for name in names], axis=1)
    if len(names) > 1:
        raise DataError(f"targets={names} are several columns, but {kind} needs one; name one")
    return columns.classes(names[0])


def _future(values: Array, horizon: int) -> Array:
    """Return the next `horizon` values of each time step of a series, `[time, horizon * values]`; NaN after its end."""
    padded = np.concatenate([values[1:], np.full((horizon, values.shape[1]), np.nan, values.dtype)])
    windows = sliding_window_view(padded, horizon, axis=0)  # [time, values, horizon]
    return windows.transpose(0, 2, 1).reshape(len(values), -1)
