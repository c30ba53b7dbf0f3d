"""RowArrays: the rows of a dense array or a list of arrays, whatever their lengths, as numpy arrays."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from stretto.base.errors import DataError

Array = NDArray[Any]
_ROWS_PER_CHECK = 4096  # rows of a dense array that are checked at once


@dataclass(frozen=True)
class RowArrays:
    """An array per row; all have the same number of dims, and the same sizes after the first dim."""

    rows: Array | Sequence[Array]  # a dense array, whose first dim is the rows, is not copied
    name: str  # in messages

    @classmethod
    def of(cls, values: ArrayLike | Tensor | Sequence[ArrayLike | Tensor], name: str) -> "RowArrays":
        """Return the rows of an array or Tensor (dim 0), or of a list of rows, which may differ in length."""
        rows: Array | list[Array]
        if isinstance(values, (Tensor, np.ndarray)):
            rows = as_array(values)
            rows = list(map(as_array, rows)) if rows.dtype == object and _is_nested(rows) else rows
        elif isinstance(values, Sequence) and not isinstance(values, str):
            rows = [as_array(value) for value in values]
            if rows and rows[0].ndim == 0:  # a plain list of numbers, one per row
                rows = np.array(values)
        else:
            raise DataError(
                f"{name} is an object of type {type(values).__name__}; use a numpy array, a torch Tensor, or a list of "
                "them, one per row"
            )
        if not len(rows):
            raise DataError(f"{name} has no rows; use at least one")
        if isinstance(rows, np.ndarray) and not rows.ndim:
            raise DataError(f"{name} is a single number; use an array whose first dim is the rows")
        result = cls(rows, name)
        result._check_shapes()
        return result

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Array:
        row: Array = np.asarray(self.rows[index])
        return row

    @property
    def ndim(self) -> int:
        """The number of dims of one row."""
        return self[0].ndim

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype that holds the values of all rows."""
        if isinstance(self.rows, np.ndarray):
            return self.rows.dtype
        return np.result_type(*{row.dtype for row in self.rows})

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The size of each row's first dim."""
        if isinstance(self.rows, np.ndarray):
            return np.full(len(self.rows), self.rows.shape[1] if self.rows.ndim > 1 else 1)
        return np.array([len(row) if row.ndim else 1 for row in self.rows])

    def parts(self, lengths: NDArray[np.int64] | None = None) -> Iterator[tuple[int, Array]]:
        """Yield all values in a few large arrays `[rows, ...]`, each with its first row; `lengths`: without padding."""
        if isinstance(self.rows, np.ndarray) and (lengths is None or self.rows.ndim < 2):
            for start in range(0, len(self.rows), _ROWS_PER_CHECK):
                yield start, self.rows[start : start + _ROWS_PER_CHECK]
            return
        for index in range(len(self.rows)):
            yield index, (self[index] if lengths is None else self[index][: lengths[index]])[None]

    def map(self, function: Callable[[Array], Array]) -> "RowArrays":
        """Return the rows with a function applied to them, all at once if they are dense."""
        is_dense = isinstance(self.rows, np.ndarray)
        return RowArrays(function(np.asarray(self.rows)) if is_dense else list(map(function, self.rows)), self.name)

    def _check_shapes(self) -> None:
        if isinstance(self.rows, np.ndarray):
            return
        ndim, features = self.rows[0].ndim, self.rows[0].shape[1:]
        for index, row in enumerate(self.rows):
            if row.ndim != ndim or row.shape[1:] != features:
                raise DataError(
                    f"{self.name}[{index}] has shape {list(row.shape)}, but {self.name}[0] has "
                    f"{list(self.rows[0].shape)}; rows may differ in their first dim only"
                )


def as_array(values: ArrayLike | Tensor) -> Array:
    """Return a numpy array; a Tensor on the CPU is not copied."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return np.asarray(values)


def _is_nested(rows: Array) -> bool:
    """Whether the elements of an array of objects are arrays or lists, and not texts."""
    first = rows[0]
    return rows.ndim == 1 and not isinstance(first, (str, bytes)) and isinstance(first, (Sequence, np.ndarray, Tensor))
