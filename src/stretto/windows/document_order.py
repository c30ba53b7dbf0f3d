"""DocumentOrder: which part of which document each lane has in each window.

    section 0   lane 0   |-------doc 7-------|--doc          documents of section 0 (see shuffle_pools.py)
                lane 1   2--|------------doc 9---
    section 1   lane 2   |-----doc 31----|---doc 28--        documents of section 1
                lane 3   --|--doc 30-|---doc 35---|

A rank reads and arranges only the documents of its own lanes' sections. Sections must agree on the number of windows in
a pool without each other's lengths. They have the same size, so they share an upper bound, which counts a whole window
for the last one of each document. It is close if documents are much longer than a window; if they are not, or if the
data is small, there is one section, whose windows are counted.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from stretto.base.errors import DataError
from stretto.base.keys import derive_key
from stretto.base.position import Position
from stretto.store.lru_cache import LruCache, lru_cache_field
from stretto.store.sequences import IntArray
from stretto.windows.row_units import RowUnits, StepUnits, StoredDocuments
from stretto.windows.sections import count_sections
from stretto.windows.shuffle import permutation
from stretto.windows.shuffle_pools import GROUP_BYTES, RowTable, ShufflePools

# The approximate number of windows per lane in a pool; in each pool, the end of a lane may cut one document.
WINDOWS_PER_POOL = 256
# A pool is arranged as a whole, so it has at most about this many documents, or two per lane if that is more.
_MAX_DOCUMENTS_PER_POOL = 1 << 18
# For sections, documents have at least this many windows on average,
_MIN_WINDOWS_PER_DOCUMENT = 16
# and a section's part of a pool has at least this many times the time steps of the longest document.
_MIN_DOCUMENTS_PER_SECTION = 64


class LaneWindows(NamedTuple):
    """One window of some lanes: each lane's document, where the window starts in it, and its number of time steps."""

    documents: RowTable
    offsets: IntArray
    lengths: IntArray


class _SectionDocuments(NamedTuple):
    """A section's documents in a pool in random order, and the number of windows before each, then the total."""

    documents: RowTable
    windows_before: IntArray


@dataclass(frozen=True)
class DocumentOrder:
    """The documents of all lanes in all epochs; a window depends only on seed and position."""

    pools: ShufflePools
    lanes: int
    window: int
    own_lanes: range
    num_windows: int | None = None  # in each pool; None: as many as needed, if there is only one section
    _arranged: LruCache[list[_SectionDocuments]] = lru_cache_field(2)  # by (epoch, pool)

    def __post_init__(self) -> None:
        num_sections = self.pools.num_sections
        if self.num_windows is None and num_sections > 1:
            raise DataError(f"num_windows=None is not the same in each of the {num_sections} sections; set it")
        if self.lanes % num_sections:
            raise DataError(f"lanes={self.lanes} is not a multiple of the {num_sections} sections; use one that is")
        if self.own_lanes.step != 1 or not 0 <= self.own_lanes.start < self.own_lanes.stop <= self.lanes:
            raise DataError(f"own_lanes={self.own_lanes} are not in range(0, {self.lanes}); use consecutive lanes")

    @classmethod
    def arrange(cls, source: StoredDocuments, lanes: range, num_lanes: int, window: int, seed: int) -> Self:
        """Return the order of a store's documents in `num_lanes` lanes, for those in `lanes`."""
        sequences = source.sequences
        num_bytes = sum(file.num_bytes for file in sequences.store.files)
        num_sections = _count_sections(source, num_lanes, window, num_bytes)
        if num_sections == 1:
            pool_rows = WINDOWS_PER_POOL * num_lanes * window / sequences.mean_length
            pool_rows = min(int(pool_rows) + 1, max(_MAX_DOCUMENTS_PER_POOL, 2 * num_lanes))
            group_rows = GROUP_BYTES * sequences.num_sequences // num_bytes + 1
            pools = ShufflePools(RowUnits(source), seed, pool_rows, group_units=group_rows)
            return cls(pools, num_lanes, window, lanes)
        # Of n time steps, n - 1 are inputs, in at most (n - 1 + window - 1) / window windows.
        units = StepUnits(source, max(0, window - 2))
        lanes_per_section = num_lanes // num_sections
        pool_units = WINDOWS_PER_POOL * lanes_per_section * window
        longest = sequences.longest + units.per_row
        pools = ShufflePools(
            units,
            seed,
            pool_units,
            num_sections,
            max_runs=max(1, min(64, pool_units // (_MIN_DOCUMENTS_PER_SECTION * longest))),
            group_units=max(1, GROUP_BYTES * sum(units.shard_units) // (num_bytes * num_sections)),
        )
        # The last document of a run may extend beyond the run.
        max_units = pools.num_runs * (pools.max_run_units + longest)
        return cls(pools, num_lanes, window, lanes, -(-max_units // (window * lanes_per_section)))

    def next_position(self, position: Position) -> Position:
        """Return the position of the window after the one at `position`."""
        return self.pools.next_position(position, self._num_windows_at(position))

    def fraction(self, position: Position) -> float:
        """Return approximately what fraction of the epoch lies before a position."""
        # At the start of a pool, its number of windows doesn't matter, so the pool is not arranged.
        return self.pools.fraction(position, self._num_windows_at(position) if position.index else 1)

    def windows(self, position: Position) -> LaneWindows:
        """Return the window at a position of each of the own lanes."""
        num_windows = self._num_windows_at(position)
        if not 0 <= position.index < num_windows:
            raise DataError(f"{position} does not exist: that pool ends at window {num_windows - 1}")
        parts = []
        for section, arranged in zip(self._own_sections, self._arrange(position), strict=True):
            first = section * self._lanes_per_section
            lanes = range(max(first, self.own_lanes.start), min(first + self._lanes_per_section, self.own_lanes.stop))
            parts.append(self._section_windows(arranged, np.array(lanes) - first, position.index))
        documents, offsets, lengths = zip(*parts, strict=True)
        return LaneWindows(RowTable.concatenate([*documents]), np.concatenate(offsets), np.concatenate(lengths))

    @property
    def _lanes_per_section(self) -> int:
        return self.lanes // self.pools.num_sections

    @property
    def _own_sections(self) -> range:
        return range(
            self.own_lanes.start // self._lanes_per_section, -(-self.own_lanes.stop // self._lanes_per_section)
        )

    def _section_windows(self, arranged: _SectionDocuments, lanes: IntArray, index: int) -> LaneWindows:
        documents, windows_before = arranged
        total, num_lanes = int(windows_before[-1]), self._lanes_per_section
        # Lane i has windows total * i // num_lanes up to total * (i + 1) // num_lanes of the section.
        windows = total * lanes // num_lanes + index
        has_data = windows < total * (lanes + 1) // num_lanes
        # A lane that has ended keeps its row, with length 0.
        windows = np.where(has_data, windows, 0)
        # The minimum only matters for a pool without windows, where all lengths are 0.
        indices = np.minimum(np.searchsorted(windows_before, windows, side="right"), len(documents.lengths)) - 1
        offsets = (windows - windows_before[indices]) * self.window
        rows = documents.take(indices)
        return LaneWindows(rows, offsets, np.where(has_data, np.minimum(rows.lengths - offsets, self.window), 0))

    def _num_windows_at(self, position: Position) -> int:
        """Return the number of windows of the pool's longest lane; 1 (empty) if the pool has nothing to predict."""
        if self.num_windows is not None:
            return self.num_windows
        return max(1, -(-int(self._arrange(position)[0].windows_before[-1]) // self.lanes))

    def _arrange(self, position: Position) -> list[_SectionDocuments]:
        epoch, pool = position.epoch, position.pool
        return self._arranged.get(
            (epoch, pool), lambda: [self._arrange_section(epoch, pool, section) for section in self._own_sections]
        )

    def _arrange_section(self, epoch: int, pool: int, section: int) -> _SectionDocuments:
        rows = self.pools.rows(epoch, pool, section)
        key = derive_key(self.pools.seed, "epoch", epoch, "pool", pool, "section", section)
        rows = rows.take(permutation(key, len(rows.lengths)))
        if not len(rows.lengths):
            rows = RowTable(*(np.zeros(1, np.int64) for _ in rows))  # nothing of any document
        return _SectionDocuments(rows, np.concatenate([[0], (-(-rows.lengths // self.window)).cumsum()]))


def _count_sections(source: StoredDocuments, num_lanes: int, window: int, num_bytes: int) -> int:
    sequences = source.sequences
    if sequences.mean_length < _MIN_WINDOWS_PER_DOCUMENT * window:
        return 1
    # All sections have equally many lanes, and each of them so many that a pool is much longer than any document.
    min_steps = _MIN_DOCUMENTS_PER_SECTION * sequences.longest
    num_sections = count_sections(
        num_bytes, sequences.num_steps / (num_lanes * window), sequences.num_steps // min_steps
    )
    while num_sections > 1 and (
        num_lanes % num_sections or WINDOWS_PER_POOL * num_lanes * window < num_sections * min_steps
    ):
        num_sections //= 2
    return num_sections
