"""DocumentOrder: which part of which document each lane has in each window.

    section 0   lane 0   |-------doc 7-------|--doc          documents of section 0 (see shuffle_pools.py)
                lane 1   2--|------------doc 9---
    section 1   lane 2   |-----doc 31----|---doc 28--        documents of section 1
                lane 3   --|--doc 30-|---doc 35---|

A rank reads and arranges only the documents of its own lanes' sections. Sections must agree on the number of windows in
a pool without each other's lengths. They have the same size, so they share an upper bound, which counts a whole window
for the last one of each document. It is close if documents are much longer than a window, or all shorter. If they are
not, there is one section, whose windows are counted, unless there are too many lanes to arrange in one place and the
bound is at most 1.5 times what is needed.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np

from stretto.base.errors import DataError
from stretto.base.keys import derive_key
from stretto.base.position import Position
from stretto.store.lru_cache import LruCache
from stretto.store.sequences import IntArray, Sequences
from stretto.windows.row_units import RowUnits, StepUnits, UnitSource
from stretto.windows.sections import count_sections
from stretto.windows.sequence_rows import SequenceRows
from stretto.windows.shuffle import permutation
from stretto.windows.shuffle_pools import GROUP_BYTES, RowTable, ShufflePools

# The approximate number of windows per lane in a pool; in each pool, the end of a lane may cut one document.
WINDOWS_PER_POOL = 256
# A pool is arranged as a whole, so it has at most about this many documents, or two per lane if that is more.
_MAX_DOCUMENTS_PER_POOL = 1 << 18
# With sections, a process that has all of them arranges at most this many.
_MAX_DOCUMENTS_OF_SECTIONS = 1 << 25
# For sections, documents have at least this many windows on average, or a pool would not have enough documents,
_MIN_WINDOWS_PER_DOCUMENT = 16
# unless there are so many lanes; even then, the bound on the windows is at most so many times their number,
_MAX_WINDOW_EXCESS = 1.5
# a section's part of a pool has at least this many times the time steps of the longest document,
_MIN_DOCUMENTS_PER_SECTION = 64
# and a section has at least this many lanes, unless all sections have equally many.
_MIN_LANES_PER_SECTION = 32
_MAX_RUNS_PER_SECTION = 64


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

    def __post_init__(self) -> None:
        num_sections = self.pools.num_sections
        if self.num_windows is None and num_sections > 1:
            raise DataError(f"num_windows=None is not the same in each of the {num_sections} sections; set it")
        if self.lanes < num_sections:
            raise DataError(f"lanes={self.lanes} is less than the {num_sections} sections; use as many or more")
        if self.own_lanes.step != 1 or not 0 <= self.own_lanes.start < self.own_lanes.stop <= self.lanes:
            raise DataError(f"own_lanes={self.own_lanes} are not in range(0, {self.lanes}); use consecutive lanes")

    @classmethod
    def arrange(cls, sequences: Sequences, own_lanes: range, lanes: int, window: int, seed: int) -> Self:
        """Return the order of a store's documents in `lanes` lanes, for those in `own_lanes`."""
        documents = SequenceRows(sequences, num_ahead=1)  # the last time step of a document is a target only
        units = _measure(documents, window)
        num_units, num_documents = sum(units.source.shard_units), sequences.num_sequences
        num_bytes = sum(file.num_bytes for file in sequences.store.files)
        max_units = min(
            num_units,
            WINDOWS_PER_POOL * lanes * window // units.num_steps,
            _MAX_DOCUMENTS_OF_SECTIONS * num_units // num_documents,
        )
        max_sections = max_units // (_MIN_DOCUMENTS_PER_SECTION * units.longest)
        num_sections = count_sections(num_bytes, sequences.num_steps / (lanes * window), min(lanes, max_sections))
        while num_sections > 1 and lanes % num_sections and lanes // num_sections < _MIN_LANES_PER_SECTION:
            num_sections //= 2
        has_short_documents = sequences.mean_length < _MIN_WINDOWS_PER_DOCUMENT * window
        if num_sections > 1 and has_short_documents:
            windows = SequenceRows(sequences, window, min_steps=2)
            if (
                2 * lanes <= _MAX_DOCUMENTS_PER_POOL
                or num_units * units.num_steps > _MAX_WINDOW_EXCESS * windows.approximate_count * window
            ):
                num_sections = 1
        if num_sections == 1:
            pool_rows = int(WINDOWS_PER_POOL * lanes * window / sequences.mean_length) + 1
            pool_rows = min(pool_rows, max(_MAX_DOCUMENTS_PER_POOL, 2 * lanes))
            group_rows = GROUP_BYTES * num_documents // num_bytes + 1
            pools = ShufflePools(RowUnits(documents), seed, pool_rows, group_units=group_rows)
            return cls(pools, lanes, window, own_lanes)
        pool_units = max_units // num_sections
        max_runs = min(_MAX_RUNS_PER_SECTION, pool_units // (_MIN_DOCUMENTS_PER_SECTION * units.longest))
        group_units = GROUP_BYTES * num_units // (num_bytes * num_sections)
        pools = ShufflePools(units.source, seed, pool_units, num_sections, max(1, max_runs), max(1, group_units))
        # The last document of a run may extend beyond the run.
        max_steps = pools.num_runs * (pools.max_run_units + units.longest) * units.num_steps
        return cls(pools, lanes, window, own_lanes, -(-max_steps // (window * (lanes // num_sections))))

    @cached_property
    def _arranged(self) -> LruCache[list[_SectionDocuments]]:
        """The latest pools, by (epoch, pool).

        To go from one position to the next takes the previous pool too, unless its number of windows is known.
        """
        return LruCache(2 if self.num_windows is None else 1)

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
            lanes = self._section_lanes(section)
            own_lanes = range(max(lanes.start, self.own_lanes.start), min(lanes.stop, self.own_lanes.stop))
            numbers = np.array(own_lanes) - lanes.start
            parts.append(self._section_windows(arranged, numbers, len(lanes), position.index))
        documents, offsets, lengths = zip(*parts, strict=True)
        return LaneWindows(RowTable.concatenate([*documents]), np.concatenate(offsets), np.concatenate(lengths))

    def _section_lanes(self, section: int) -> range:
        start, stop = (self.lanes * number // self.pools.num_sections for number in (section, section + 1))
        return range(start, stop)

    @property
    def _own_sections(self) -> range:
        # The last section that starts at a lane or before it.
        first, last = (
            ((lane + 1) * self.pools.num_sections - 1) // self.lanes
            for lane in (self.own_lanes.start, self.own_lanes.stop - 1)
        )
        return range(first, last + 1)

    def _section_windows(self, arranged: _SectionDocuments, lanes: IntArray, num_lanes: int, index: int) -> LaneWindows:
        documents, windows_before = arranged
        total = int(windows_before[-1])
        # Lane i has windows total * i // num_lanes up to total * (i + 1) // num_lanes of the section.
        windows = total * lanes // num_lanes + index
        has_data = windows < total * (lanes + 1) // num_lanes
        # A lane that has ended keeps its row, with length 0.
        windows = np.where(has_data, windows, 0)
        # The minimum only matters for a pool without windows, where all lengths are 0.
        indices = np.minimum(np.searchsorted(windows_before, windows, side="right"), len(documents.lengths)) - 1
        offsets = (windows - windows_before[indices]) * self.window
        rows = documents.take(indices).expand()
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
            rows = self.pools.any_row(epoch, pool, section)._replace(lengths=np.zeros(1, np.int64))
        windows_before = np.concatenate([[0], (-(-rows.lengths // self.window)).cumsum()])
        return _SectionDocuments(rows.compact(), windows_before)


class _DocumentUnits(NamedTuple):
    """How the documents of sections are measured."""

    source: UnitSource
    longest: int  # the most that a document takes up
    num_steps: int  # that windows of documents have at most per unit, padding included


def _measure(documents: SequenceRows, window: int) -> _DocumentUnits:
    """Return the units with the closest upper bound on the number of windows."""
    sequences = documents.sequences
    windows_of_longest = max(1, -(-(sequences.longest - 1) // window))
    rows = _DocumentUnits(RowUnits(documents), 1, windows_of_longest * window)
    # Of n time steps, n - 1 are inputs, in at most (n - 1 + window - 1) / window windows.
    per_document = max(0, window - 2)
    steps = _DocumentUnits(StepUnits(documents, per_document), sequences.longest + per_document, 1)
    return min(steps, rows, key=lambda units: sum(units.source.shard_units) * units.num_steps)
