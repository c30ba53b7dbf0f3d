"""BatchOrder: a pool's sequences as global batches, alike in length, under a budget; and a batch dealt to replicas."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stretto.base.errors import DataError
from stretto.base.keys import derive_key
from stretto.base.position import Position
from stretto.store.lru_cache import LruCache
from stretto.store.sequences import IntArray
from stretto.windows.shuffle import permutation, splitmix64
from stretto.windows.shuffle_pools import RowTable, ShufflePools

# In how many steps a pool's limits are tightened.
_NUM_TIGHTENINGS = 256


@dataclass(frozen=True)
class BatchLimits:
    """How large a global batch may be. None of it depends on how many ranks there are."""

    budget: int  # steps of the batch when all its rows are padded to its longest
    rows: int
    row_multiple: int = (
        8  # larger batches have a row_multiple of so many rows, so that they divide evenly among replicas
    )

    def __post_init__(self) -> None:
        if min(self.budget, self.rows, self.row_multiple) < 1:
            raise DataError(
                f"budget={self.budget}, rows={self.rows} and row_multiple={self.row_multiple} must all be at least 1"
            )


@dataclass(frozen=True)
class BatchOrder:
    """The global batches of every epoch, as a pure function of seed, epoch and position."""

    pools: ShufflePools
    limits: BatchLimits

    @cached_property
    def _plans(self) -> LruCache[tuple[RowTable, IntArray]]:
        return LruCache(2)

    def batch(self, position: Position) -> RowTable:
        """Return the rows of the global batch at a position, longest first."""
        rows, edges = self._planned(position)
        start, stop = edges[position.index]
        return rows.take(slice(start, stop))

    def next_position(self, position: Position) -> Position:
        """Return the position that follows."""
        return self.pools.next_position(position, len(self._planned(position)[1]))

    def fraction(self, position: Position) -> float:
        """Return how much of its epoch lies before a position, about."""
        # A pool's start is known without planning it.
        return self.pools.fraction(position, len(self._planned(position)[1]) if position.index else 1)

    def _planned(self, position: Position) -> tuple[RowTable, IntArray]:
        epoch, pool = position.epoch, position.pool
        rows, edges = self._plans.get((epoch, pool), lambda: self._plan_pool(epoch, pool))
        if not 0 <= position.index < len(edges):
            raise DataError(f"{position} is not there: that pool has {len(edges)} windows")
        return rows, edges

    def _plan_pool(self, epoch: int, pool: int) -> tuple[RowTable, IntArray]:
        """A pool's rows, longest first and at random among equals, and the edges of its batches in random order."""
        rows = self.pools.rows(epoch, pool)
        key = derive_key(self.pools.seed, "epoch", epoch, "pool", pool)
        rows = rows.take(_longest_first(rows.lengths, key))
        edges = pack(rows.lengths, self.limits)
        batches = np.stack([edges[:-1], edges[1:]], axis=1)
        return rows, batches[permutation(derive_key(key, "batches"), len(batches))]


def _longest_first(lengths: IntArray, key: int) -> IntArray:
    """Return the order of lengths, longest first and at random among equals."""
    longest = int(lengths.max())
    # In one number each, the length above and chance below: that sorts several times faster than by two.
    bits = np.uint64(longest.bit_length() or 1)
    words = (longest - lengths).astype(np.uint64) << (np.uint64(64) - bits)
    # Stable, as two that are equal after all must lie alike on every machine.
    return (words | splitmix64(key, len(lengths)) >> bits).argsort(kind="stable")


def pack(lengths: IntArray, limits: BatchLimits) -> IntArray:
    """Return the edges of as few batches as the limits allow, of lengths that descend; the last not much smaller."""
    edges = _pack(lengths, limits, _NUM_TIGHTENINGS)
    fewest = len(edges)
    low, high = 1, _NUM_TIGHTENINGS
    # The tightest limits that need no more batches leave the least for the last one to be short of.
    while low < high:
        middle = (low + high) // 2
        tried = _pack(lengths, limits, middle, fewest)
        if len(tried) == fewest:
            edges, high = tried, middle
        else:
            low = middle + 1
    return np.array(edges)


def _pack(lengths: IntArray, limits: BatchLimits, part: int, most: int | None = None) -> list[int]:
    """Fill batches one after the other, with limits of `part` in `_NUM_TIGHTENINGS`; give up beyond `most` edges."""
    total = len(lengths)
    budget = max(limits.budget * part // _NUM_TIGHTENINGS, int(lengths[0]))
    most_rows = max(limits.rows * part // _NUM_TIGHTENINGS, 1)
    edges = [0]
    while edges[-1] < total and len(edges) != most:
        start = edges[-1]
        # One batch of the budget at least: that no row is longer was checked.
        num_rows = min(budget // max(1, int(lengths[start])), most_rows)
        if num_rows > limits.row_multiple:
            num_rows -= num_rows % limits.row_multiple
        edges.append(min(start + num_rows, total))
    return edges if edges[-1] == total else [*edges, total]


def assign_rows(num_rows: int, index: int, count: int) -> IntArray:
    """Return which rows of a batch, longest first, are those of replica `index` of `count`.

        rows       0  1  2  3 | 4  5  6  7 | 8  9
        replica    0  1  2  3 | 3  2  1  0 | 0  1

    There and back, so that all get as many rows (or one more) and nearly as many steps.
    """
    rounds = np.arange(-(-num_rows // count))
    rows = rounds * count + np.where(rounds % 2, count - 1 - index, index)
    return rows[rows < num_rows]
