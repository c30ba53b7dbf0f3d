"""Columns of numbers over a run of any length, downsampled to a bounded number of buckets."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_BUFFER_ROWS = 4096  # rows are flushed together, since NumPy is slow on single rows
_MAX_FINITE = 1e200


class DownsampledSeries:
    """Keeps the mean, minimum and maximum of rows added one by one, in up to `max_buckets` buckets of equal size.

    rows     . . . . . . . . . . .      while there are few, each row is a bucket
    buckets  [. .] [. .] [. .] [.       then a bucket holds two rows, four, eight ...
    """

    def __init__(self, *names: str, max_buckets: int = 600) -> None:
        self.names = names
        self._bucket_size = 1
        self._max_buckets = max_buckets
        self._num_flushed = 0
        self._pending: list[Sequence[float]] = []
        self._bucket_starts = np.zeros(0, np.int64)  # row numbers
        # Count of finite values, their sum, minimum and maximum: [4, buckets, columns].
        self._table = np.zeros((4, 0, len(names)))

    def add(self, *row: float) -> None:
        """Add a row, with NaN where a column has no value."""
        self._pending.append(row)
        if len(self._pending) >= _BUFFER_ROWS:
            self._flush()

    @property
    def num_rows(self) -> int:
        return self._num_flushed + len(self._pending)

    @property
    def bucket_size(self) -> int:
        """The number of rows in a bucket."""
        self._flush()
        return self._bucket_size

    def mean(self, name: str) -> Floats:
        """Return a column's mean per bucket, NaN where a bucket has no finite value."""
        count, total, _, _ = self._column(name)
        means: Floats = np.divide(total, count, out=np.full(len(total), np.nan), where=count > 0)
        return means

    def min(self, name: str) -> Floats:
        count, _, low, _ = self._column(name)
        return np.where(count > 0, low, np.nan)

    def max(self, name: str) -> Floats:
        count, _, _, high = self._column(name)
        return np.where(count > 0, high, np.nan)

    def count(self, name: str) -> Floats:
        """Return the number of finite values of a column per bucket."""
        counts: Floats = self._column(name)[0]
        return counts

    def total(self, name: str) -> float:
        """Return the sum of a column's finite values."""
        return float(self._column(name)[1].sum())

    def _column(self, name: str) -> Floats:
        self._flush()
        column: Floats = self._table[:, :, self.names.index(name)]
        return column

    def _flush(self) -> None:
        """Move pending rows to buckets, which grow to two, four, ... rows each if there would be too many buckets."""
        if not self._pending:
            return
        rows = np.array(self._pending, np.float64)
        # Values of at least _MAX_FINITE count as not finite: their sums and ratios would overflow.
        is_finite = np.abs(rows) < _MAX_FINITE
        new_table = np.stack([is_finite, *(np.where(is_finite, rows, neutral) for neutral in (0.0, np.inf, -np.inf))])
        row_numbers = np.arange(self._num_flushed, self._num_flushed + len(rows))
        self._num_flushed += len(rows)
        self._pending.clear()
        self._bucket_starts = np.concatenate([self._bucket_starts, row_numbers])
        table = np.concatenate([self._table, new_table], axis=1)
        while -(-self._num_flushed // self._bucket_size) > self._max_buckets:
            self._bucket_size *= 2
        first_indices = np.flatnonzero(np.diff(self._bucket_starts // self._bucket_size, prepend=-1))
        self._bucket_starts = self._bucket_starts[first_indices]
        reductions = (np.add, np.add, np.minimum, np.maximum)
        reduced = [reduction.reduceat(part, first_indices) for reduction, part in zip(reductions, table, strict=True)]
        self._table = np.stack(reduced)


def exponential_mean(values: Floats, counts: Floats, spans: Floats) -> Floats:
    """Return, for each value, the exponentially weighted mean of the values up to it.

    `counts` is the number of steps in each value; a value of no steps is skipped, and its mean is NaN. `spans` are in
    steps, with the meaning of `span` in pandas' `ewm`.
    """
    means = np.full(len(values), np.nan)
    total = weight = 0.0
    for index, (value, count, span) in enumerate(zip(values, counts, spans, strict=True)):
        if count:
            decay = float((1 - 2 / (span + 1)) ** count)
            total, weight = total * decay + float(value) * (1 - decay), weight * decay + (1 - decay)
            means[index] = total / weight
    return means


def smooth(values: Floats, counts: Floats, span: float) -> Floats:
    """Return a weighted mean of about `span` steps on each side of each value: a trailing mean would lag.

    Near the start, where curves fall steeply, the span is only about a fifth of the steps so far.
    """
    spans = np.minimum(span, 1 + np.cumsum(counts) / 5)
    backward = exponential_mean(values[::-1], counts[::-1], spans[::-1])[::-1]
    return (exponential_mean(values, counts, spans) + backward) / 2
