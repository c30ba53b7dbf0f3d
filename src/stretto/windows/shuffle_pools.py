"""ShufflePools: the rows of an epoch in random order, one pool at a time (a shuffle buffer with random access).

    shards   |--------A--------|--------B--------|--------C--------|--------D--------|   in random order,
    runs     |--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|   cut into runs,
    pools    |A3 B0 B5 A1 ...  |A4 B2 ...        |D1 C5 C0 D2 ...  |C3 D0 ...        |   shuffled within a few shards

A run is a range of consecutive rows of one shard; their lengths are read in one piece. Any pool can be computed
without the others, and needs only a few shards, so a small cache is enough for data in remote storage.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import numpy as np

from stretto.base.errors import DataError
from stretto.base.keys import derive_key
from stretto.base.position import Position
from stretto.store.lru_cache import LruCache, lru_cache_field
from stretto.store.sequences import IntArray
from stretto.windows.shuffle import permutation

# Runs are shuffled within a group of this many shards: more give a more random order, fewer need a smaller cache.
_SHARDS_AT_ONCE = 8
_MAX_RUN_LENGTH = 1024  # rows
# A pool has about this many runs or more, if there are enough rows.
_MIN_RUNS_PER_POOL = 64


class ShardedLengths(Protocol):
    """The lengths of the rows in each shard; the random order depends on nothing else in the data."""

    @property
    def shard_sizes(self) -> Sequence[int]: ...
    def lengths(self, shard: int, start: int, stop: int) -> IntArray:
        """Return the lengths of rows `start` to `stop` of a shard."""


class RowTable(NamedTuple):
    """A column-wise table of rows: each row's shard, its index in the shard, and its length."""

    shards: IntArray
    indices: IntArray
    lengths: IntArray

    def take(self, rows: IntArray | slice) -> "RowTable":
        return RowTable(self.shards[rows], self.indices[rows], self.lengths[rows])

    def row_ids(self) -> list[tuple[int, int]]:
        """Return the shard and index of each row."""
        return list(zip(self.shards.tolist(), self.indices.tolist(), strict=True))


@dataclass(frozen=True)
class ShufflePools:
    """The pools of all epochs: each row is in exactly one pool per epoch."""

    source: ShardedLengths
    seed: int
    pool_rows: int  # the approximate number of rows in a pool
    _epochs: LruCache[tuple[IntArray, IntArray]] = lru_cache_field(2)  # by epoch: the result of `_arrange_epoch`
    _groups: LruCache[IntArray] = lru_cache_field(4)  # by (epoch, group): that of `_shuffle_group`

    def __post_init__(self) -> None:
        if self.pool_rows < 1:
            raise DataError(f"pool_rows={self.pool_rows} must be at least 1")

    @property
    def _run_length(self) -> int:
        """The number of consecutive rows in a run."""
        return max(1, min(_MAX_RUN_LENGTH, self.pool_rows // _MIN_RUNS_PER_POOL))

    @property
    def num_pools(self) -> int:
        """The number of pools, the same in each epoch."""
        return max(1, round(self._num_runs * self._run_length / self.pool_rows))

    @cached_property
    def _num_runs(self) -> int:
        return sum(-(-size // self._run_length) for size in self.source.shard_sizes)

    def rows(self, epoch: int, pool: int) -> RowTable:
        """Return the rows of a pool, run by run."""
        if epoch < 0 or not 0 <= pool < self.num_pools:
            raise DataError(f"pool {pool} of epoch {epoch} does not exist; use epoch >= 0, pool < {self.num_pools}")
        first, stop = (self._num_runs * number // self.num_pools for number in (pool, pool + 1))
        parts = [self._read_run(shard, run) for shard, run in self._runs(epoch, first, stop)]
        return RowTable(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def next_position(self, position: Position, num_windows: int) -> Position:
        """Return the position after `position`, which is in a pool of `num_windows` windows."""
        if position.index + 1 < num_windows:
            return replace(position, index=position.index + 1)
        if position.pool + 1 < self.num_pools:
            return Position(position.epoch, position.pool + 1)
        return Position(position.epoch + 1)

    def fraction(self, position: Position, num_windows: int) -> float:
        """Return approximately what fraction of the epoch lies before a position in a pool of `num_windows` windows."""
        return (position.pool + position.index / num_windows) / self.num_pools

    def _read_run(self, shard: int, run: int) -> RowTable:
        start = run * self._run_length
        stop = min(start + self._run_length, self.source.shard_sizes[shard])
        return RowTable(np.full(stop - start, shard), np.arange(start, stop), self.source.lengths(shard, start, stop))

    def _runs(self, epoch: int, first: int, stop: int) -> list[tuple[int, int]]:
        """Return runs `first` to `stop` of an epoch's order, each as its shard and its index in the shard."""
        _, group_starts = self._epochs.get(epoch, lambda: self._arrange_epoch(epoch))
        runs: list[tuple[int, int]] = []
        group = int(np.searchsorted(group_starts, first, side="right")) - 1
        while first < stop:
            group_start, end = int(group_starts[group]), min(stop, int(group_starts[group + 1]))
            shuffled = self._groups.get((epoch, group), partial(self._shuffle_group, epoch, group))
            runs += [(int(shard), int(run)) for shard, run in shuffled[first - group_start : end - group_start]]
            first, group = end, group + 1
        return runs

    def _arrange_epoch(self, epoch: int) -> tuple[IntArray, IntArray]:
        """Return an epoch's shards in random order, and the number of runs before each group of shards and in total."""
        sizes = np.array(self.source.shard_sizes, np.int64)
        shards = permutation(derive_key(self.seed, "epoch", epoch), len(sizes))
        runs_per_shard = -(-sizes[shards] // self._run_length)
        runs_per_group = np.add.reduceat(runs_per_shard, np.arange(0, len(sizes), _SHARDS_AT_ONCE))
        return shards, np.concatenate([[0], runs_per_group.cumsum()])

    def _shuffle_group(self, epoch: int, group: int) -> IntArray:
        """Return the runs of a group of shards in random order: `[runs, 2]`, shard and index in the shard."""
        shards, _ = self._epochs.get(epoch, lambda: self._arrange_epoch(epoch))
        sizes = self.source.shard_sizes
        runs = np.concatenate(
            [
                np.stack(np.broadcast_arrays(shard, np.arange(-(-sizes[shard] // self._run_length))), axis=1)
                for shard in shards[group * _SHARDS_AT_ONCE : (group + 1) * _SHARDS_AT_ONCE]
            ]
        )
        shuffled: IntArray = runs[permutation(derive_key(self.seed, "epoch", epoch, "group", group), len(runs))]
        return shuffled
