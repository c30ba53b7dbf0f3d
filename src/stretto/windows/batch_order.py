"""BatchOrder: which rows of similar lengths form each global batch.

    section 0   |500 498 ..|412 411 ..|...|31 30 ..|12 11 ..|..|      the rows of a pool, longest first,
    section 1   |497 493 ..|415 409 ..|...|31 31 ..|12 12 ..|..|      in equally many parts per section
                 batch 3    batch 0        batch 2  batch 1

Each section packs its own rows, so a rank needs only the lengths in the sections that it reads. The number of parts
must be known without the other sections' lengths. All sections of a pool have the same size, and so the same upper
bound on the number of parts they need; the rows are spread evenly over that many.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np

from stretto.base.errors import DataError
from stretto.base.keys import derive_key
from stretto.base.position import Position
from stretto.store.lru_cache import LruCache
from stretto.store.sequences import IntArray
from stretto.windows.shuffle import permutation, splitmix64
from stretto.windows.shuffle_pools import RowTable, ShufflePools

# To even out the batches of a pool, `pack` lowers the limits in steps of 1 / _NUM_LIMIT_STEPS.
_NUM_LIMIT_STEPS = 256


@dataclass(frozen=True)
class BatchLimits:
    """How large a section's part of a batch may be; with one section, how large a batch may be."""

    budget: int  # maximum of rows x time steps of the longest row, so padding counts
    max_rows: int
    # For equal shares, row counts above this are rounded down to a multiple, except in a pool's last-packed batch.
    row_multiple: int = 8

    def __post_init__(self) -> None:
        if min(self.budget, self.max_rows, self.row_multiple) < 1:
            values = f"budget={self.budget}, max_rows={self.max_rows} and row_multiple={self.row_multiple}"
            raise DataError(f"{values} must all be at least 1")


class PackedPool(NamedTuple):
    """A pool in parts: for each section, its rows (compact), longest first, and where its parts start and stop."""

    rows: list[RowTable]
    edges: list[IntArray]
    order: IntArray  # which part of each section is in each batch


@dataclass(frozen=True)
class BatchOrder:
    """The global batches of all epochs: a length-bucketing batch sampler; a batch depends only on seed and position."""

    pools: ShufflePools
    limits: BatchLimits
    num_batches: int | None = None  # in each pool; None: as few as the limits allow, if there is only one section
    own_sections: range | None = None  # those whose rows are returned; others are neither read nor packed; None: all

    def __post_init__(self) -> None:
        if self.num_batches is None and self.pools.num_sections > 1:
            problem = f"num_batches=None is not the same in each of the {self.pools.num_sections} sections"
            raise DataError(f"{problem}; set it to what count_batches returns")
        if self.num_batches is not None and self.num_batches < 1:
            raise DataError(f"num_batches={self.num_batches} must be at least 1, or None")
        sections = self.sections
        if sections.step != 1 or not 0 <= sections.start < sections.stop <= self.pools.num_sections:
            problem = f"own_sections={sections} are not in range(0, {self.pools.num_sections})"
            raise DataError(f"{problem}; use consecutive sections of the pools")

    @cached_property
    def _packed(self) -> LruCache[PackedPool]:
        """The latest pools, by (epoch, pool).

        To go from one position to the next takes the previous pool too, unless its number of batches is known.
        """
        return LruCache(2 if self.num_batches is None else 1)

    @property
    def sections(self) -> range:
        """The sections whose rows are returned."""
        return range(self.pools.num_sections) if self.own_sections is None else self.own_sections

    def batch(self, position: Position) -> RowTable:
        """Return the rows of the global batch at a position, section by section."""
        return RowTable.concatenate(self.parts(position))

    def parts(self, position: Position) -> list[RowTable]:
        """Return each section's part of the global batch at a position, longest row first."""
        num_batches = self._num_batches_at(position)
        if not 0 <= position.index < num_batches:
            raise DataError(f"{position} does not exist: that pool ends at window {num_batches - 1}")
        packed = self._pool_at(position)
        part = packed.order[position.index]
        return [
            rows.take(slice(edges[part], edges[part + 1])).expand()
            for rows, edges in zip(packed.rows, packed.edges, strict=True)
        ]

    def any_row(self, position: Position) -> RowTable:
        """Return a row, of the own sections and the pool at a position if there is one, else from nearby."""
        for rows in self._pool_at(position).rows:
            if len(rows.lengths):
                return rows.take(slice(1)).expand()
        return self.pools.any_row(position.epoch, position.pool, self.sections.start)

    def next_position(self, position: Position) -> Position:
        """Return the position of the batch after the one at `position`."""
        return self.pools.next_position(position, self._num_batches_at(position))

    def fraction(self, position: Position) -> float:
        """Return approximately what fraction of the epoch lies before a position."""
        # At the start of a pool, its number of batches doesn't matter, so the pool is not packed.
        return self.pools.fraction(position, self._num_batches_at(position) if position.index else 1)

    def _num_batches_at(self, position: Position) -> int:
        return len(self._pool_at(position).order) if self.num_batches is None else self.num_batches

    def _pool_at(self, position: Position) -> PackedPool:
        epoch, pool = position.epoch, position.pool
        return self._packed.get((epoch, pool), lambda: self._pack_pool(epoch, pool))

    def _pack_pool(self, epoch: int, pool: int) -> PackedPool:
        key = derive_key(self.pools.seed, "epoch", epoch, "pool", pool)
        tables, edges = [], []
        for section in self.sections:
            rows = self.pools.rows(epoch, pool, section)
            rows = rows.take(_longest_first(rows.lengths, derive_key(key, "section", section)))
            tables.append(rows.compact())
            edges.append(pack(rows.lengths, self.limits, self.num_batches))
        return PackedPool(tables, edges, permutation(derive_key(key, "batches"), len(edges[0]) - 1))


def _longest_first(lengths: IntArray, key: int) -> IntArray:
    """Return the order that sorts by length, longest first, and at random among equal lengths."""
    longest = int(lengths.max(initial=0))
    # Sorting by one 64-bit number (length in the high bits, random bits below) is several times faster than lexsort.
    length_bits = np.uint64(longest.bit_length() or 1)  # at least 1: no shift by all 64 bits
    high_bits = (longest - lengths).astype(np.uint64) << (np.uint64(64) - length_bits)
    # Stable: equal numbers must have the same order on every machine.
    return (high_bits | (splitmix64(key, len(lengths)) >> length_bits)).argsort(kind="stable")


def count_batches(num_steps: int, longest: int, limits: BatchLimits) -> int:
    """Return how many batches `pack` needs at most for rows of together `num_steps`, none longer than `longest`.

    Each row counts as `budget / max_rows` time steps or more, so that batches with too many rows for one are covered.
    """
    # The worst case: rounding down loses nearly one row of each batch,
    rows = min(limits.budget // longest, limits.max_rows)
    full_batches = Fraction(num_steps * (rows + 1), rows * limits.budget)
    # and padding loses 1 - q in a batch whose next one starts with rows q times as long, at most ln(1 / q). The product
    # of all q is the ratio of the shortest to the longest row.
    shortest = max(Fraction(1), Fraction(limits.budget, limits.max_rows))
    return math.ceil(full_batches + _log_bound(longest / shortest) + 1)


def _log_bound(ratio: Fraction) -> Fraction:
    """Return the logarithm of `ratio`, or up to 0.05 more; 0 if it is negative.

    Without floats: a last bit that differs between two machines must not change the number of batches.
    """
    # 2**bits is at least ratio**16, and ln(2) is less than 45427 / 65536.
    bits = (math.ceil(max(ratio, Fraction(1)) ** 16) - 1).bit_length()
    return Fraction(bits * 45427, 16 * 65536)


def pack(lengths: IntArray, limits: BatchLimits, num_batches: int | None = None) -> IntArray:
    """Return the edges `[batches + 1]` of batches of similar size; `lengths` must be descending.

    There are `num_batches`, as many as `count_batches` says or more; by default, as few as possible.
    """
    if not len(lengths):
        return np.zeros(1 + (num_batches or 1), np.int64)
    edges = _pack_greedily(lengths, limits, _NUM_LIMIT_STEPS)
    if num_batches is not None and len(edges) - 1 > num_batches:
        # Equal shares matter less than the number of batches.
        limits = replace(limits, row_multiple=1)
        edges = _pack_greedily(lengths, limits, _NUM_LIMIT_STEPS)
    num_edges = len(edges) if num_batches is None else num_batches + 1
    if len(edges) > num_edges:
        raise DataError(
            f"num_batches={num_batches} is less than the {len(edges) - 1} that are needed; use count_batches"
        )
    low, high = 1, _NUM_LIMIT_STEPS
    # Binary search for the lowest limits that still give `num_edges` edges, so that batches are about equally large.
    while low < high:
        middle = (low + high) // 2
        candidate = _pack_greedily(lengths, limits, middle, num_edges)
        if len(candidate) <= num_edges:
            edges, high = candidate, middle
        else:
            low = middle + 1
    return np.array(_split_largest(edges, lengths, num_edges))


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


def _split_largest(edges: list[int], lengths: IntArray, num_edges: int) -> list[int]:
    """Split the largest batches in two until there are `num_edges` edges; empty batches follow if all have one row."""
    while len(edges) < num_edges and len(edges) <= len(lengths):
        sizes = np.diff(edges)
        largest = int(np.where(sizes > 1, sizes * lengths[edges[:-1]], -1).argmax())
        edges.insert(largest + 1, edges[largest] + int(sizes[largest]) // 2)
    return edges + [edges[-1]] * (num_edges - len(edges))
