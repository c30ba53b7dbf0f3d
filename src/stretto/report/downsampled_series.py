"""Thinned: columns of numbers over a run of any length, in bounded memory: mean, least and most of each stretch."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_BUFFER_ROWS = 4096
_MAX_FINITE = 1e200


class DownsampledSeries:
    """Takes rows one by one; keeps no more than `most` stretches of equally many rows.

    rows       . . . . . . . . . . .      while there are few, each is a stretch of its own
    stretches  [. .] [. .] [. .] [.       then of two, of four, of eight ...
    """

    def __init__(self, *names: str, max_buckets: int = 600) -> None:
        self.names = names
        self._bucket_size = 1
        self._max_buckets = max_buckets
        self._num_flushed = 0
        self._pending: list[Sequence[float]] = []
        self._bucket_starts = np.zeros(0, np.int64)
        # How many are finite, their sum, the least and the most: [4, stretches, columns].
        self._table = np.zeros((4, 0, len(names)))

    def add(self, *row: float) -> None:
        """Take in a row; NaN where a column has no value."""
        self._pending.append(row)
        if len(self._pending) >= _BUFFER_ROWS:
            self._flush()

    @property
    def num_rows(self) -> int:
        return self._num_flushed + len(self._pending)

    @property
    def bucket_size(self) -> int:
        """How many rows a stretch has."""
        self._flush()
        return self._bucket_size

    def mean(self, name: str) -> Floats:
        """Return a column's mean over each stretch; NaN where it has no finite value."""
        count, total, _, _ = self._column(name)
        found: Floats = np.divide(total, count, out=np.full(len(total), np.nan), where=count > 0)
        return found

    def min(self, name: str) -> Floats:
        count, _, low, _ = self._column(name)
        return np.where(count > 0, low, np.nan)

    def max(self, name: str) -> Floats:
        count, _, _, high = self._column(name)
        return np.where(count > 0, high, np.nan)

    def count(self, name: str) -> Floats:
        """Return how many finite values a column has in each stretch."""
        found: Floats = self._column(name)[0]
        return found

    def _column(self, name: str) -> Floats:
        self._flush()
        found: Floats = self._table[:, :, self.names.index(name)]
        return found

    def _flush(self) -> None:
        if not self._pending:
            return
        rows = np.array(self._pending, np.float64)
        # What is larger than this is as good as infinite, and its sums and ratios would be.
        is_there = np.abs(rows) < _MAX_FINITE
        new = np.stack([is_there, *(np.where(is_there, rows, blank) for blank in (0.0, np.inf, -np.inf))])
        firsts = np.arange(self._num_flushed, self._num_flushed + len(rows))
        self._num_flushed += len(rows)
        self._pending.clear()
        self._bucket_starts = np.concatenate([self._bucket_starts, firsts])
        table = np.concatenate([self._table, new], axis=1)
        while -(-self._num_flushed // self._bucket_size) > self._max_buckets:
            self._bucket_size *= 2
        edges = np.flatnonzero(np.diff(self._bucket_starts // self._bucket_size, prepend=-1))
        self._bucket_starts = self._bucket_starts[edges]
        ways = (np.add, np.add, np.minimum, np.maximum)
        self._table = np.stack([way.reduceat(part, edges, axis=0) for way, part in zip(ways, table, strict=True)])


def exponential_mean(values: Floats, counts: Floats, spans: Floats) -> Floats:
    """Return the mean of the last values, each weighing less the longer ago it is; `spans` says of about how many."""
    found = np.full(len(values), np.nan)
    total = weight = 0.0
    for index, (value, count, span) in enumerate(zip(values, counts, spans, strict=True)):
        if count:
            kept = float((1 - 2 / (span + 1)) ** count)
            total, weight = total * kept + float(value) * (1 - kept), weight * kept + (1 - kept)
            found[index] = total / weight
    return found


def smooth(values: Floats, counts: Floats, span: float) -> Floats:
    """Return the mean of about `span` values around each, from both sides alike: a trailing mean would lag behind.

    Near the start it is of fewer: that is where curves fall steeply.
    """
    spans = np.minimum(span, 1 + np.cumsum(counts) / 5)
    back = exponential_mean(values[::-1], counts[::-1], spans[::-1])[::-1]
    return (exponential_mean(values, counts, spans) + back) / 2
