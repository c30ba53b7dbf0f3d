"""RowInputs: the inputs of rows in memory, tokens or channels, with their lengths."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from stretto.base.errors import DataError
from stretto.store.sequences import IntArray
from stretto.windows.items import pad
from stretto.windows.row_arrays import Array, RowArrays, as_array
from stretto.windows.target_classes import holds_text

ArrayRows = ArrayLike | Tensor | Sequence[ArrayLike | Tensor]
"""A numpy array or torch Tensor whose first dim is the rows, or a list of arrays, one per row."""


@dataclass(frozen=True)
class RowInputs:
    """Rows of tokens or channels. Time steps beyond a row's length are padding, and never read."""

    rows: RowArrays
    lengths: IntArray

    @classmethod
    def of(cls, inputs: ArrayRows, lengths: ArrayLike | Tensor | None = None) -> "RowInputs":
        """Return the rows of arrays, checked; by default all time steps are valid."""
        rows = RowArrays.of(inputs, "inputs")
        if holds_text(rows.dtype) and isinstance(rows[0].flat[0] if rows[0].size else None, str):
            raise DataError(
                "inputs are texts; use integers for tokens, such as vocabulary.encode(text), or train on a store: "
                'prepare_sequences([{"tokens": words, "tags": tags}, ...], FOLDER, SequenceOptions(targets=("tags",)))'
            )
        if rows.ndim not in (1, 2):
            shape = ", ".join(["rows", *map(str, rows[0].shape)])
            raise DataError(f"inputs have shape [{shape}]; use [rows, time, channels], or [rows, time] for one channel")
        if rows.dtype.kind not in "fiub":
            raise DataError(f"inputs are of type {rows.dtype}; use floats, or integers for tokens")
        result = cls(rows, _check_lengths(lengths, rows.sizes))
        if not result.is_tokens:
            _check_finite(rows, None if lengths is None else result.lengths)
        return result

    @property
    def is_tokens(self) -> bool:
        """Whether each time step is a token, and not a number per channel."""
        return self.rows.ndim == 1 and self.rows.dtype.kind in "iu"

    @property
    def kind(self) -> Literal["tokens", "channels"]:
        """What each time step is, as in `Task.inputs`."""
        return "tokens" if self.is_tokens else "channels"

    @property
    def num_channels(self) -> int:
        """The number of channels, if the inputs are not tokens."""
        return self.rows[0].shape[1] if self.rows.ndim == 2 else 1

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Array:
        """Return the valid time steps of a row: tokens `[time]`, or floats `[time, channels]`."""
        return as_inputs(self.rows[index][: self.lengths[index]])

    def read(self, indices: Sequence[int], num_steps: int) -> Tensor:
        """Return some rows as one tensor `[time, rows, ...]`, padded to `num_steps` time steps."""
        return pad([self[index] for index in indices], num_steps, 0)


def as_inputs(row: Array) -> Array:
    """Return the inputs of a row: tokens `[time]` unchanged; channels as floats `[time, channels]`."""
    if row.ndim == 1 and row.dtype.kind in "iu":
        return row
    return row.reshape(len(row), -1).astype(np.result_type(row.dtype, np.float32), copy=False)


def _check_lengths(lengths: ArrayLike | Tensor | None, sizes: IntArray) -> IntArray:
    if lengths is None:
        valid = sizes
    else:
        valid = as_array(lengths)
        if valid.shape != sizes.shape or valid.dtype.kind not in "iu":
            raise DataError(f"lengths have shape {list(valid.shape)}; give one integer per row, {len(sizes)} in all")
        valid = valid.astype(np.int64)
    is_wrong = (valid < 1) | (valid > sizes)
    if is_wrong.any():
        index = int(np.flatnonzero(is_wrong)[0])
        raise DataError(
            f"row {index} has length {valid[index]}, but must have 1 to {sizes[index]} time steps; leave out empty rows"
        )
    return valid


def _check_finite(rows: RowArrays, lengths: IntArray | None) -> None:
    if rows.dtype.kind != "f":
        return
    for first_row, part in rows.parts(lengths):
        if not np.isfinite(part).all():
            row = first_row + int(np.argwhere(~np.isfinite(part))[0][0])
            raise DataError(
                f"inputs[{row}] has a value that is NaN or infinite; replace it, and add an input that marks such steps"
            )
