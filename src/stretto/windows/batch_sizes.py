"""Batch sizes: how a dataset's rows are cut into sections, pools and runs for batches of a given size."""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeGuard

from stretto.windows.batch_order import BatchLimits, BatchOrder, count_batches
from stretto.windows.items import Items, NextTokenItems, PartItems, SlidingWindows, StoredItems
from stretto.windows.labeled_items import CutLabeledItems, LabeledItems
from stretto.windows.row_units import RowUnits, StepUnits, UnitSource
from stretto.windows.sections import count_sections
from stretto.windows.sequence_rows import SequenceRows
from stretto.windows.shuffle_pools import GROUP_BYTES, ShufflePools

# With this many batches per pool, lengths within a batch typically differ by a few percent.
_BATCHES_PER_POOL = 64
# A pool is packed as a whole, so it has at most about this many rows, or _MIN_BATCHES_PER_POOL batches if that is more.
_MAX_ROWS_PER_POOL = 1 << 18
_MIN_BATCHES_PER_POOL = 4
# If the number of rows is estimated, a pool has at most this many times as many as planned, however wrong that is.
_MAX_POOL_EXCESS = 16
# The runs of a pool, in all sections together: from so many places of the data its rows come.
_RUNS_PER_POOL = 512
_MAX_RUN_ROWS = 1024
# Rows that are not in a store are shuffled within as many shards.
_SHARDS_PER_GROUP = 8

# A section's part of a batch has room for at least this many rows of the longest length, so that less than 1/32 of it
# remains unused because one more row would not fit.
_MIN_ROWS = 32
# With sections, a pool has so many batches that the upper bound on their number is close to what is needed,
_SECTION_BATCHES_PER_POOL = 128
# and so many rows of each section that all sections' parts of a batch have similar lengths,
_MIN_ROWS_PER_SECTION = 1 << 14
# but no more than fit into memory: of each section, and of all sections together, which a single process would read.
_MAX_ROWS_PER_SECTION = 1 << 20
_MAX_ROWS_OF_SECTIONS = 1 << 25
# If less than this many batches are left, the bound would make them far too small, so there is only one section.
_MIN_SECTION_BATCHES_PER_POOL = 32
# With sections, a run has at least this many times the longest row's time steps, so that runs are about equally large.
_MIN_ROWS_PER_RUN = 128
# Sliding windows have sections if they are about this fraction of as many as there could be, or more: batches are that
# much smaller than they could be. It may be less if batches are too large for each rank to plan all of them.
_MIN_DENSITY = 0.85
_MIN_DENSITY_OF_LARGE_BATCHES = 0.25
# Without a budget, there are at most this many times as many batches as there would be full ones.
_MAX_BATCH_EXCESS = 1.06


def arrange_batches(items: Items, limits: BatchLimits, seed: int, *, has_budget: bool) -> BatchOrder:
    """Return the order of batches within `limits`, for all sections; `has_budget` is False if only rows are limited."""
    rows = _sequence_rows(items)
    if rows is not None:
        num_sections = _count_sections(items, rows, limits, has_budget=has_budget)
        if num_sections > 1:
            order = _many_sections(items, rows, limits, seed, num_sections, has_budget=has_budget)
            # Without a budget, `max_rows` is the batch size, so batches must be nearly full.
            max_rows = _MAX_BATCH_EXCESS * rows.approximate_count
            if has_budget or (order.num_batches or 1) * order.pools.num_pools * limits.max_rows <= max_rows:
                return order
    return _one_section(items, rows, limits, seed)


def has_parts(items: Items) -> TypeGuard[PartItems]:
    """Return whether a row's index in an order is its first time step.

    The rows of a subclass may be others, so the answer is not inherited.
    """
    return type(items) in (SlidingWindows, CutLabeledItems)


def _sequence_rows(items: Items) -> SequenceRows | None:
    """Return where the rows of known kinds of items start, from which alone sections can be made."""
    if has_parts(items):
        return items.sequence_rows
    if isinstance(items, LabeledItems | NextTokenItems) and type(items) in (LabeledItems, NextTokenItems):
        return SequenceRows(items.sequences, num_ahead=int(isinstance(items, NextTokenItems)))
    return None


def _count_sections(items: Items, rows: SequenceRows, limits: BatchLimits, *, has_budget: bool) -> int:
    num_rows, longest_rows = rows.approximate_count, min(limits.budget // max(1, items.longest), limits.max_rows)
    num_batches = max(num_rows * items.mean_length / limits.budget, num_rows / limits.max_rows)
    num_sections = count_sections(_num_bytes(rows), num_batches, longest_rows // _MIN_ROWS)
    # Without a budget, `max_rows` is the batch size, so no row of it may be lost by rounding.
    while not has_budget and limits.max_rows % num_sections:
        num_sections //= 2
    has_batches = _max_batches_per_pool(items, limits, num_sections) >= _MIN_SECTION_BATCHES_PER_POOL
    # Of series that are much shorter than the longest one, there are far fewer windows than there could be.
    is_large = _MIN_BATCHES_PER_POOL * longest_rows > _MAX_ROWS_PER_POOL
    min_density = _MIN_DENSITY_OF_LARGE_BATCHES if is_large else _MIN_DENSITY
    is_dense = not isinstance(items, SlidingWindows) or (
        num_rows >= min_density * rows.max_density * sum(_part_units(items, rows).shard_units)
    )
    return num_sections if has_batches and is_dense else 1


def _part_units(items: Items, rows: SequenceRows) -> StepUnits:
    if isinstance(items, SlidingWindows):
        # Nowhere are there more windows per unit than in the longest series; one of a single time step has no units.
        return StepUnits(rows, per_sequence=-1, is_spread=True)
    return StepUnits(rows)


def _max_batches_per_pool(items: Items, limits: BatchLimits, num_sections: int) -> int:
    return min(_MAX_ROWS_OF_SECTIONS, num_sections * _MAX_ROWS_PER_SECTION) // _batch_rows(items, limits)


def _batch_rows(items: Items, limits: BatchLimits) -> int:
    """Return the approximate number of rows of a batch."""
    return int(min(limits.budget / max(items.mean_length, 1), limits.max_rows)) + 1


def _num_bytes(rows: SequenceRows) -> int:
    return sum(file.num_bytes for file in rows.sequences.store.files)


class _BatchUnits(NamedTuple):
    """How the rows of sections are measured."""

    source: UnitSource
    per_batch: int
    longest: int  # the most that a row takes up
    num_batches: Callable[[int], int]  # that rows which take up so many units need at most


def _units(items: Items, rows: SequenceRows, limits: BatchLimits, *, has_budget: bool) -> _BatchUnits:
    if isinstance(items, SlidingWindows):
        # All have the same length, and there are only so many of them in a number of units.
        batch_units = min(limits.budget // items.longest, limits.max_rows) / rows.max_density
        longest = math.ceil(1 / rows.max_density) + 1
        source = _part_units(items, rows)
        return _BatchUnits(source, int(batch_units), longest, lambda num_units: math.ceil(num_units / batch_units))
    if not has_budget and rows.stride is None:
        return _BatchUnits(RowUnits(items), limits.max_rows, 1, lambda num_units: -(-num_units // limits.max_rows))
    # A batch has no room for more than `max_rows`, however short. So each sequence counts as some time steps more.
    per_sequence = 0 if limits.max_rows >= limits.budget else -(-limits.budget // limits.max_rows)
    return _BatchUnits(
        StepUnits(rows, per_sequence),
        limits.budget,
        items.longest + rows.num_ahead + per_sequence,
        lambda num_units: count_batches(num_units, max(1, items.longest), limits),
    )


def _many_sections(
    items: Items, rows: SequenceRows, limits: BatchLimits, seed: int, num_sections: int, *, has_budget: bool
) -> BatchOrder:
    max_batches = _max_batches_per_pool(items, limits, num_sections)
    max_rows = limits.max_rows // num_sections
    # With few rows, a batch never has as many time steps as the budget allows.
    budget = min(limits.budget // num_sections, max(1, items.longest) * max_rows)
    limits = BatchLimits(budget, max_rows, limits.row_multiple)
    units = _units(items, rows, limits, has_budget=has_budget)
    num_batches = max(_SECTION_BATCHES_PER_POOL, _MIN_ROWS_PER_SECTION // _batch_rows(items, limits))
    pool_units = units.per_batch * min(num_batches, max_batches)
    group_units = GROUP_BYTES * sum(units.source.shard_units) // (_num_bytes(rows) * num_sections)
    max_runs = min(_RUNS_PER_POOL // num_sections, pool_units // (_MIN_ROWS_PER_RUN * units.longest))
    pools = ShufflePools(units.source, seed, pool_units, num_sections, max(1, max_runs), max(1, group_units))
    # The last row of a run may extend beyond the run.
    max_units = pools.num_runs * (pools.max_run_units + units.longest - 1)
    return BatchOrder(pools, limits, units.num_batches(max_units))


def _one_section(items: Items, rows: SequenceRows | None, limits: BatchLimits, seed: int) -> BatchOrder:
    batch_rows = _batch_rows(items, limits)
    pool_rows = min(_BATCHES_PER_POOL * batch_rows, max(_MAX_ROWS_PER_POOL, _MIN_BATCHES_PER_POOL * batch_rows))
    max_runs = max(_BATCHES_PER_POOL, min(_RUNS_PER_POOL, pool_rows // _MAX_RUN_ROWS))
    source: UnitSource = RowUnits(items)
    pool_units = pool_rows
    if rows is not None and rows.stride is not None:
        # The number of parts of sequences is known approximately.
        source = _part_units(items, rows)
        pool_units = -(-pool_rows * sum(source.shard_units) // rows.approximate_count)
        if isinstance(items, SlidingWindows) and not rows.is_counted:
            # If the estimate is far too low, a pool must still fit into memory.
            pool_units = min(pool_units, math.ceil(_MAX_POOL_EXCESS * pool_rows / rows.max_density))
    num_units = sum(source.shard_units)
    group_units = _SHARDS_PER_GROUP * num_units // len(source.shard_units)
    if isinstance(items, StoredItems):
        group_units = GROUP_BYTES * num_units // sum(file.num_bytes for file in items.sequences.store.files)
    return BatchOrder(ShufflePools(source, seed, pool_units, 1, max_runs, max(1, group_units)), limits)
