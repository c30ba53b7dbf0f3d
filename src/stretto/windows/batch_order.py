"""BatchOrder: which rows of similar lengths form each global batch; `assign_rows`: which of them a replica reads."""

from dataclasses import dataclass

import numpy as np

from stretto.base.errors import DataError
from stretto.base.keys import derive_key
from stretto.base.position import Position
from stretto.store.lru_cache import LruCache, lru_cache_field
from stretto.store.sequences import IntArray
from stretto.windows.shuffle import permutation, splitmix64
from stretto.windows.shuffle_pools import RowTable, ShufflePools

# To even out the batches of a pool, `pack` lowers the limits in steps of 1 / _NUM_LIMIT_STEPS.
_NUM_LIMIT_STEPS = 256


@dataclass(frozen=True)
class BatchLimits:
    """How large a global batch may be, whatever the number of ranks."""

    budget: int  # maximum of rows x time steps of the longest row, so padding counts
    max_rows: int
    # For equal shares, row counts above this are rounded down to a multiple, except in a pool's last-packed batch.
    row_multiple: int = 8

    def __post_init__(self) -> None:
        if min(self.budget, self.max_rows, self.row_multiple) < 1:
            values = f"budget={self.budget}, max_rows={self.max_rows} and row_multiple={self.row_multiple}"
            raise DataError(f"{values} must all be at least 1")


@dataclass(frozen=True)
class BatchOrder:
    """The global batches of all epochs: a length-bucketing batch sampler; a batch depends only on seed and position."""

    pools: ShufflePools
    limits: BatchLimits
    _packed: LruCache[tuple[RowTable, IntArray]] = lru_cache_field(2)  # by (epoch, pool)

    def batch(self, position: Position) -> RowTable:
        """Return the rows of the global batch at a position, longest first."""
        rows, batches = self._pool_at(position)
        start, stop = batches[position.index]
        return rows.take(slice(start, stop))

    def next_position(self, position: Position) -> Position:
        """Return the position of the batch after the one at `position`."""
        return self.pools.next_position(position, len(self._pool_at(position)[1]))

    def fraction(self, position: Position) -> float:
        """Return approximately what fraction of the epoch lies before a position."""
        # At the start of a pool, its number of batches doesn't matter, so the pool is not packed.
        return self.pools.fraction(position, len(self._pool_at(position)[1]) if position.index else 1)

    def _pool_at(self, position: Position) -> tuple[RowTable, IntArray]:
        """Return the result of `_pack_pool`; raise DataError if the pool has no batch at `position`."""
        epoch, pool = position.epoch, position.pool
        rows, batches = self._packed.get((epoch, pool), lambda: self._pack_pool(epoch, pool))
        if not 0 <= position.index < len(batches):
            raise DataError(f"{position} does not exist: that pool ends at window {len(batches) - 1}")
        return rows, batches

    def _pack_pool(self, epoch: int, pool: int) -> tuple[RowTable, IntArray]:
        """Return a pool's rows, longest first, and the start and stop of each batch `[batches, 2]` in random order."""
        rows = self.pools.rows(epoch, pool)
        key = derive_key(self.pools.seed, "epoch", epoch, "pool", pool)
        rows = rows.take(_longest_first(rows.lengths, key))
        edges = pack(rows.lengths, self.limits)
        batches = np.stack([edges[:-1], edges[1:]], axis=1)
        return rows, batches[permutation(derive_key(key, "batches"), len(batches))]


def _longest_first(lengths: IntArray, key: int) -> IntArray:
    """Return the order that sorts by length, longest first, and at random among equal lengths."""
    longest = int(lengths.max())
    # Sorting by one 64-bit number (length in the high bits, random bits below) is several times faster than lexsort.
    length_bits = np.uint64(longest.bit_length() or 1)  # at least 1: no shift by all 64 bits
    high_bits = (longest - lengths).astype(np.uint64) << (np.uint64(64) - length_bits)
    # Stable: equal numbers must have the same order on every machine.
    return (high_bits | (splitmix64(key, len(lengths)) >> length_bits)).argsort(kind="stable")


def pack(lengths: IntArray, limits: BatchLimits) -> IntArray:
    """Return the edges `[batches + 1]` of as few batches as possible, of similar size; `lengths` must be descending."""
    edges = _pack_greedily(lengths, limits, _NUM_LIMIT_STEPS)
    num_edges = len(edges)
    low, high = 1, _NUM_LIMIT_STEPS
    # Binary search for the lowest limits that still give `num_edges` edges, so that batches are about equally large.
    while low < high:
        middle = (low + high) // 2
        candidate = _pack_greedily(lengths, limits, middle, num_edges)
        if len(candidate) == num_edges:
            edges, high = candidate, middle
        else:
            low = middle + 1
    return np.array(edges)


def _pack_greedily(lengths: IntArray, limits: BatchLimits, numerator: int, max_edges: int | None = None) -> list[int]:
    """Return the edges of batches filled to `numerator / _NUM_LIMIT_STEPS` of the limits; at most `max_edges + 1`."""
    total = len(lengths)
    budget = max(limits.budget * numerator // _NUM_LIMIT_STEPS, int(lengths[0]))
    max_rows = max(limits.max_rows * numerator // _NUM_LIMIT_STEPS, 1)
    edges = [0]
    while edges[-1] < total and len(edges) != max_edges:
        start = edges[-1]
        # At least one row fits: the budget was raised to the length of the longest row.
        num_rows = min(budget // max(1, int(lengths[start])), max_rows)
        if num_rows > limits.row_multiple:
            num_rows -= num_rows % limits.row_multiple
        edges.append(min(start + num_rows, total))
    return edges if edges[-1] == total else [*edges, total]  # if rows are left: `max_edges + 1` edges


def assign_rows(num_rows: int, index: int, count: int) -> IntArray:
    """Return which rows of a batch (longest first) belong to replica `index` of `count`.

        rows       0  1  2  3 | 4  5  6  7 | 8  9
        replica    0  1  2  3 | 3  2  1  0 | 0  1

    The direction alternates, so that all replicas get nearly the same number of time steps.
    """
    rounds = np.arange(-(-num_rows // count))
    rows = rounds * count + np.where(rounds % 2, count - 1 - index, index)
    return rows[rows < num_rows]
