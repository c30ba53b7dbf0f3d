"""from_arrays: rows in memory, as numpy arrays or torch Tensors, for training in batches."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from stretto.base.errors import DataError
from stretto.base.task import TargetKind, Task, has_own_length
from stretto.store.sequences import IntArray
from stretto.windows.items import Payload, RowId, SingleShardItems, pad_next_tokens
from stretto.windows.row_arrays import RowArrays
from stretto.windows.row_inputs import ArrayRows, RowInputs
from stretto.windows.row_targets import RowTargets, find_targets
from stretto.windows.target_classes import count_classes

_SAMPLED_ROWS = 64  # how many rows the digest of the data is computed from


def from_arrays(
    inputs: ArrayRows,
    targets: ArrayRows | None = None,
    *,
    lengths: ArrayLike | Tensor | None = None,
    target_kind: TargetKind | None = None,
    classes: int | Sequence[str] | None = None,
    num_tokens: int | None = None,
) -> "ArrayItems":
    """Return rows in memory for `Batches`: numpy arrays or torch Tensors, dense or as a list of rows.

    `inputs` are floats `[rows, time, channels]` or `[rows, time]` (one channel), or integers `[rows, time]`, which are
    tokens; or a list of such rows, which may differ in length. `lengths` says how many time steps of each row of a
    dense array are valid. Nothing is copied or scaled.

    The kind of `targets` follows from their shape and dtype. If that is ambiguous, name it with `target_kind`:

    - `class_per_row`: integers or text `[rows]`, a class per row
    - `values_per_row`: floats `[rows]` or `[rows, values]`
    - `class_per_step`: integers or text `[rows, time]`, a class per time step
    - `values_per_step`: floats `[rows, time, values]`, or `[rows, time]` if `target_kind` says so
    - `sequence_per_row`: a list with a sequence per row, of any length: integers that count from 1 (class 0 is the
      blank of `nn.CTCLoss`), names of symbols, or a text, whose characters are the symbols; or padded with -100.
      This kind is never assumed
    - `next_token`: no targets; the inputs are tokens

    -100 or None marks a missing class, NaN a missing value. `classes` is the number of classes, or their names: if
    targets are integers, in their order, else in any order. `num_tokens` is the size of the vocabulary. By default both
    are those that occur. Give them for validation data, in which some may not occur.
    """
    rows = RowInputs.of(inputs, lengths)
    num_inputs = rows.num_channels
    if rows.is_tokens:
        num_inputs = count_classes(rows.rows.parts(rows.lengths), "inputs", num_tokens, may_be_missing=False)
    if targets is None:
        if not rows.is_tokens:
            raise DataError("targets are missing, and inputs are floats, not tokens; give targets")
        return ArrayItems(rows, Task.language(num_inputs))
    target_rows = RowArrays.of(targets, "targets")
    if len(target_rows) != len(rows):
        raise DataError(f"targets have {len(target_rows)} rows, but inputs have {len(rows)}; make them equal")
    row_targets = find_targets(target_rows, rows.rows.sizes, target_kind, classes)
    task = Task(rows.kind, num_inputs, row_targets.kind, row_targets.num_outputs)
    return ArrayItems(rows, task, row_targets)


@dataclass(frozen=True)
class ArrayItems(SingleShardItems):
    """Rows in memory, made by `from_arrays`: inputs with their lengths, and targets."""

    inputs: RowInputs
    data_task: Task
    targets: RowTargets | None = None  # None: the next token
    input_categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of a table's columns of text
    series_names: tuple[str, ...] = ()  # of each row: the value of a table's column `by`

    @property
    def task(self) -> Task:
        return self.data_task

    @property
    def labels(self) -> tuple[str, ...]:
        return () if self.targets is None or self.targets.classes is None else self.targets.classes.names

    @property
    def categories(self) -> Mapping[str, tuple[str, ...]]:
        return self.input_categories

    @cached_property
    def num_steps(self) -> IntArray:
        """The number of time steps of each row. The last token is only a target."""
        return self.inputs.lengths - 1 if self.targets is None else self.inputs.lengths

    @property
    def location(self) -> str:
        return "inputs"

    @cached_property
    def digest(self) -> str:
        names = f" {dict(self.categories)}" if self.categories else ""
        content = hashlib.sha256(f"{self.data_task} {self.labels}{names}".encode() + self.inputs.lengths.tobytes())
        # A sample is enough to notice other data, and large arrays are not read twice.
        for index in np.unique(np.linspace(0, len(self.inputs) - 1, _SAMPLED_ROWS).astype(int)).tolist():
            content.update(np.ascontiguousarray(self.inputs[index]).tobytes())
            if self.targets is not None:
                content.update(repr(self.targets.rows[index].tolist()).encode())
        return content.hexdigest()

    def cut(self, num_steps: int) -> "ArrayItems":
        """Return the same time steps in rows of at most `num_steps`, each of which starts from the initial state.

        Targets must be per time step, since only the last part of a row would have its target per row.
        """
        if num_steps < 1:
            raise DataError(f"num_steps={num_steps} must be at least 1")
        if self.targets is None or self.data_task.is_per_row or has_own_length(self.data_task.targets):
            raise DataError(f"targets of kind {self.data_task.targets} can't be cut; use targets per time step")
        parts = [
            (index, slice(start, min(start + num_steps, length)))
            for index, length in enumerate(self.inputs.lengths.tolist())
            for start in range(0, length, num_steps)
        ]
        inputs = RowArrays([self.inputs.rows[index][part] for index, part in parts], "inputs")
        targets = RowArrays([self.targets.rows[index][part] for index, part in parts], "targets")
        lengths = np.array([part.stop - part.start for _, part in parts])
        names = tuple(self.series_names[index] for index, _ in parts) if self.series_names else ()
        row_targets = replace(self.targets, rows=targets)
        return replace(self, inputs=RowInputs(inputs, lengths), targets=row_targets, series_names=names)

    def read(self, rows: Sequence[RowId], num_steps: int, *, inputs: bool, targets: bool) -> Payload:
        """Return the rows, and their targets."""
        indices = [index for _, index in rows]
        if self.targets is None:
            tokens = [self.inputs[index] for index in indices]
            return pad_next_tokens(tokens, num_steps, inputs=inputs, targets=targets)
        x = self.inputs.read(indices, num_steps) if inputs else None
        if not targets:
            return x, None
        return x, self.targets.read(indices, self.inputs.lengths[indices].tolist(), num_steps)
