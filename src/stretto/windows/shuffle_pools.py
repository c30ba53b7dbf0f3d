"""ShufflePools: the rows of an epoch in random order, one pool at a time (a shuffle buffer with random access).

    shards     |------D------|------A------|------C------|------B------|   in random order, end to end,
    sections   |============ 0 ============|============ 1 ============|   cut into equal sections,
    groups     |==== 0 =====|===== 1 ======|==== 0 =====|===== 1 ======|   each into groups that fit into a cache,
    runs       |0 |1 |2 |3  |0  |1 |2  |3  |0 |1 |2 |3  |0  |1 |2  |3  |   each into runs, shuffled within their group
    pool 0         1  2                           2  3
    pool 1      0        3                     0     1
    pool 2                   1      3                        1  2

A run is a stretch of consecutive rows, and a row belongs to the run that it starts in. Each pool takes equally many
runs of equal size from each section. A section is for one node of a large cluster (MosaicML Streaming: a canonical
node), which reads nothing else in this epoch. Their number depends on the data and the size of batches, never on the
number of ranks. Any pool can be computed without the others, and the groups that it needs fit into a small cache.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from stretto.base.errors import DataError
from stretto.base.keys import derive_key
from stretto.base.position import Position
from stretto.store.lru_cache import LruCache, lru_cache_field
from stretto.store.sequences import IntArray
from stretto.windows.row_units import UnitSource
from stretto.windows.shuffle import permutation

# The groups of all sections together: half of the default cache, so that one node can hold them too.
GROUP_BYTES = 512 << 20


class RowTable(NamedTuple):
    """A column-wise table of rows: each row's shard, its index in the shard (see `UnitSource`), and its length."""

    shards: IntArray
    indices: IntArray
    lengths: IntArray

    def take(self, rows: IntArray | slice) -> "RowTable":
        return RowTable(self.shards[rows], self.indices[rows], self.lengths[rows])

    def compact(self) -> "RowTable":
        """Return the same numbers in the smallest types that hold them, to be stored: computing could overflow."""
        return RowTable(*(column.astype(np.min_scalar_type(column.max(initial=0))) for column in self))

    def expand(self) -> "RowTable":
        """Return the same numbers as int64."""
        return RowTable(*(column.astype(np.int64) for column in self))

    def row_ids(self) -> list[tuple[int, int]]:
        """Return the shard and index of each row."""
        return list(zip(self.shards.tolist(), self.indices.tolist(), strict=True))

    @classmethod
    def concatenate(cls, tables: list["RowTable"]) -> "RowTable":
        if not tables:
            return cls(*(np.zeros(0, np.int64) for _ in cls._fields))
        return cls(*(np.concatenate(columns) for columns in zip(*tables, strict=True)))


@dataclass(frozen=True)
class ShufflePools:
    """The pools of all epochs: each row is in exactly one pool per epoch, and in one section."""

    source: UnitSource
    seed: int
    pool_units: int  # the approximate size of a section's part of a pool
    num_sections: int = 1
    max_runs: int = 64  # the number of runs of a section in a pool, if it has as many units
    group_units: int | None = None  # the approximate size of a group; None: a section is one group
    _shards: LruCache[tuple[IntArray, IntArray]] = lru_cache_field(2)  # by epoch: the result of `_arrange_shards`
    _any_rows: LruCache[RowTable] = lru_cache_field(4)  # by (epoch, pool, section): the result of `any_row`
    _shuffled: LruCache[IntArray] = lru_cache_field(4)  # by (epoch, section, group): the order of its runs

    def __post_init__(self) -> None:
        if self.pool_units < 1:
            raise DataError(f"pool_units={self.pool_units} must be at least 1")

    @cached_property
    def num_units(self) -> int:
        """The size of the data, the same in each epoch."""
        return sum(self.source.shard_units)

    @cached_property
    def num_pools(self) -> int:
        """The number of pools, the same in each epoch."""
        return max(1, round(self.num_units / self.num_sections / self.pool_units))

    @cached_property
    def num_runs(self) -> int:
        """The number of runs of each section in each pool; none is empty if each row takes up one unit."""
        return max(1, min(self.max_runs, self.num_units // self.num_sections // self.num_pools))

    @cached_property
    def max_run_units(self) -> int:
        """An upper bound on the size of a run; rounding adds less than 1 in each of three divisions."""
        return self.num_units // (self.num_sections * self.num_pools * self.num_runs) + 3

    @cached_property
    def _num_groups(self) -> int:
        if self.group_units is None:
            return 1
        return max(1, min(self.num_pools, round(self.num_units / self.num_sections / self.group_units)))

    def rows(self, epoch: int, pool: int, section: int = 0) -> RowTable:
        """Return the rows of a section in a pool, run by run."""
        if epoch < 0 or not 0 <= pool < self.num_pools:
            raise DataError(f"pool {pool} of epoch {epoch} does not exist; use epoch >= 0, pool < {self.num_pools}")
        group = ((pool + 1) * self._num_groups - 1) // self.num_pools
        # The pools of the group, then the units of the section and those of the group.
        first, last = (self.num_pools * number // self._num_groups for number in (group, group + 1))
        section_start, section_stop = (
            self.num_units * number // self.num_sections for number in (section, section + 1)
        )
        size = section_stop - section_start
        start, stop = (section_start + size * number // self.num_pools for number in (first, last))
        num_runs = self.num_runs * (last - first)
        key = derive_key(self.seed, "epoch", epoch, "section", section, "group", group)
        order = self._shuffled.get((epoch, section, group), partial(permutation, key, num_runs))
        tables = []
        for run in order[self.num_runs * (pool - first) : self.num_runs * (pool - first + 1)].tolist():
            edges = [start + (stop - start) * number // num_runs for number in (run, run + 1)]
            tables += self._read(epoch, *edges)
        return RowTable.concatenate(tables)

    def any_row(self, epoch: int, pool: int, section: int) -> RowTable:
        """Return a row of a section, from the nearest pool that has one; of another section if it has none."""
        return self._any_rows.get((epoch, pool, section), lambda: self._find_row(epoch, pool, section))

    def _find_row(self, epoch: int, pool: int, section: int) -> RowTable:
        sections = (section, *(other for other in range(self.num_sections) if other != section))
        for candidate in sections:
            for other_pool in sorted(range(self.num_pools), key=lambda other: abs(other - pool)):
                rows = self.rows(epoch, other_pool, candidate)
                if len(rows.lengths):
                    return rows.take(slice(1))
        raise DataError("the data has no rows; use data with at least one row")

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

    def _read(self, epoch: int, start: int, stop: int) -> list[RowTable]:
        """Return the rows that start between two units of an epoch, shard by shard."""
        shards, shard_starts = self._shards.get(epoch, lambda: self._arrange_shards(epoch))
        tables = []
        place = int(np.searchsorted(shard_starts, start, side="right")) - 1
        while start < stop:
            shard, shard_start = int(shards[place]), int(shard_starts[place])
            end = min(stop, int(shard_starts[place + 1]))
            indices, lengths = self.source.rows(shard, start - shard_start, end - shard_start)
            tables.append(RowTable(np.full(len(lengths), shard), indices, lengths))
            start, place = end, place + 1
        return tables

    def _arrange_shards(self, epoch: int) -> tuple[IntArray, IntArray]:
        """Return an epoch's shards in random order, and the units before each, then the total."""
        sizes = np.array(self.source.shard_units, np.int64)
        shards = permutation(derive_key(self.seed, "epoch", epoch), len(sizes))
        return shards, np.concatenate([[0], sizes[shards].cumsum()])
