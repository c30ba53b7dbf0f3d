"""ShufflePools: the sequences of an epoch in random order, a pool at a time, never a list of everything.

    shards   |--------A--------|--------B--------|--------C--------|--------D--------|   in random order,
    runs     |--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|   a few shards at once,
    pools    |A3 B0 B5 A1 ...  |A4 B2 ...        |D1 C5 C0 D2 ...  |C3 D0 ...        |   their runs mixed

Whoever asks for a pool works out just that one. Sequences that lie together are read together, at any time from few
shards, so that storage far away and a small cache will do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from stretto.base.errors import DataError
from stretto.base.keys import derive_key
from stretto.base.position import Position
from stretto.store.lru_cache import LruCache
from stretto.store.sequences import IntArray
from stretto.windows.shuffle import permutation

# How many shards' runs are mixed: more is more random, fewer need less room in a cache.
_SHARDS_AT_ONCE = 8
_MAX_RUN_LENGTH = 1024
# A pool has runs from at least so many places, where there are as many.
_RUNS_PER_POOL = 64


class ShardedLengths(Protocol):
    """Things of unequal length in shards: all that an order has to know of them."""

    @property
    def shard_sizes(self) -> Sequence[int]: ...
    def lengths(self, shard: int, start: int, stop: int) -> IntArray:
        """Return the lengths of the things from `start` up to `stop` of a shard."""
        ...


class RowTable(NamedTuple):
    """Some sequences: of each its shard, its number there, and its length."""

    shards: IntArray
    indices: IntArray
    lengths: IntArray

    def take(self, chosen: IntArray | slice) -> "RowTable":
        return RowTable(self.shards[chosen], self.indices[chosen], self.lengths[chosen])

    def row_ids(self) -> list[tuple[int, int]]:
        """Return the shard and the number there of each."""
        return list(zip(self.shards.tolist(), self.indices.tolist(), strict=True))


@dataclass(frozen=True)
class ShufflePools:
    """The pools of every epoch: each sequence is in exactly one pool an epoch."""

    source: ShardedLengths
    seed: int
    pool_rows: int  # about how many sequences a pool has

    def __post_init__(self) -> None:
        if self.pool_rows < 1:
            raise DataError(f"pool_rows={self.pool_rows} must be at least 1")

    @cached_property
    def _epochs(self) -> LruCache[tuple[IntArray, IntArray]]:
        return LruCache(2)

    @cached_property
    def _groups(self) -> LruCache[IntArray]:
        return LruCache(4)

    @property
    def _run(self) -> int:
        """How many sequences lie together in a run."""
        return max(1, min(_MAX_RUN_LENGTH, self.pool_rows // _RUNS_PER_POOL))

    @property
    def num_pools(self) -> int:
        """How many pools an epoch has: the same in each epoch."""
        return max(1, round(self._num_runs * self._run / self.pool_rows))

    @cached_property
    def _num_runs(self) -> int:
        return int(_runs_of(np.array(self.source.shard_sizes, np.int64), self._run).sum())

    def rows(self, epoch: int, pool: int) -> RowTable:
        """Return the sequences of a pool, in the order in which they lie in their runs."""
        if epoch < 0 or not 0 <= pool < self.num_pools:
            raise DataError(f"pool {pool} of epoch {epoch} is not one of the {self.num_pools} pools of an epoch")
        num_runs = self._num_runs
        first, stop = (num_runs * number // self.num_pools for number in (pool, pool + 1))
        parts = [self._read_run(shard, run) for shard, run in self._runs(epoch, first, stop)]
        return RowTable(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def next_position(self, position: Position, num_windows: int) -> Position:
        """Return the position that follows one in a pool of so many windows."""
        if position.index + 1 < num_windows:
            return replace(position, index=position.index + 1)
        if position.pool + 1 < self.num_pools:
            return Position(position.epoch, position.pool + 1)
        return Position(position.epoch + 1)

    def fraction(self, position: Position, num_windows: int) -> float:
        """Return how much of its epoch lies before a position in a pool of so many windows, about."""
        return (position.pool + position.index / num_windows) / self.num_pools

    def _read_run(self, shard: int, run: int) -> RowTable:
        start = run * self._run
        stop = min(start + self._run, self.source.shard_sizes[shard])
        return RowTable(np.full(stop - start, shard), np.arange(start, stop), self.source.lengths(shard, start, stop))

    def _runs(self, epoch: int, first: int, stop: int) -> list[tuple[int, int]]:
        """The runs, as shard and number in it, that an epoch's order has from `first` up to `stop`."""
        _, starts = self._arrange_epoch(epoch)
        found: list[tuple[int, int]] = []
        group = int(np.searchsorted(starts, first, side="right")) - 1
        while first < stop:
            last = min(stop, int(starts[group + 1]))
            runs = self._shuffle_group(epoch, group)[first - starts[group] : last - starts[group]]
            found += [(int(shard), int(run)) for shard, run in runs]
            first, group = last, group + 1
        return found

    def _arrange_epoch(self, epoch: int) -> tuple[IntArray, IntArray]:
        """The order of an epoch's shards, and how many runs lie before each group of them."""
        return self._epochs.get(epoch, lambda: self._make_epoch(epoch))

    def _make_epoch(self, epoch: int) -> tuple[IntArray, IntArray]:
        sizes = np.array(self.source.shard_sizes, np.int64)
        shards = permutation(derive_key(self.seed, "epoch", epoch), len(sizes))
        num_runs = _runs_of(sizes[shards], self._run)
        groups = np.add.reduceat(num_runs, np.arange(0, len(sizes), _SHARDS_AT_ONCE))
        return shards, np.concatenate([[0], groups.cumsum()])

    def _shuffle_group(self, epoch: int, group: int) -> IntArray:
        """The runs of some shards, mixed: `[runs, 2]`, shard and number."""
        return self._groups.get((epoch, group), lambda: self._make_group(epoch, group))

    def _make_group(self, epoch: int, group: int) -> IntArray:
        shards, _ = self._arrange_epoch(epoch)
        sizes = self.source.shard_sizes
        runs = np.concatenate(
            [
                np.stack(np.broadcast_arrays(shard, np.arange(-(-sizes[shard] // self._run))), axis=1)
                for shard in shards[group * _SHARDS_AT_ONCE : (group + 1) * _SHARDS_AT_ONCE]
            ]
        )
        mixed: IntArray = runs[permutation(derive_key(self.seed, "epoch", epoch, "group", group), len(runs))]
        return mixed


def _runs_of(sizes: IntArray, run: int) -> IntArray:
    return -(-sizes // run)
