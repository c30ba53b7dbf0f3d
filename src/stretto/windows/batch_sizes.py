"""Batch sizes: how a dataset's rows are cut into sections, pools and runs for batches of a given size."""

from typing import TypeGuard

from stretto.store.sequences import Sequences
from stretto.windows.batch_order import BatchLimits, BatchOrder, count_batches
from stretto.windows.items import Items, NextTokenItems, StoredItems
from stretto.windows.labeled_items import LabeledItems
from stretto.windows.row_units import RowUnits, StepUnits, UnitSource
from stretto.windows.sections import count_sections
from stretto.windows.shuffle_pools import GROUP_BYTES, ShufflePools

WholeSequences = LabeledItems | NextTokenItems

# With this many batches per pool, lengths within a batch typically differ by a few percent.
_BATCHES_PER_POOL = 64
# A pool is packed as a whole, so it has at most about this many rows, or _MIN_BATCHES_PER_POOL batches if that is more.
_MAX_ROWS_PER_POOL = 1 << 18
_MIN_BATCHES_PER_POOL = 4
# The runs of a pool, in all sections together: from so many places of the data its rows come.
_RUNS_PER_POOL = 512
_MAX_RUN_ROWS = 1024
# Rows that are not in a store are shuffled within as many shards.
_SHARDS_PER_GROUP = 8

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


def arrange_batches(items: Items, limits: BatchLimits, seed: int, *, has_budget: bool) -> BatchOrder:
    """Return the order of batches within `limits`, for all sections; `has_budget` is False if only rows are limited."""
    if _is_whole_sequences(items):
        num_sections = _count_sections(items, limits, has_budget=has_budget)
        if num_sections > 1:
            return _many_sections(items, limits, seed, num_sections, has_budget=has_budget)
    return _one_section(items, limits, seed)


def _is_whole_sequences(items: Items) -> TypeGuard[WholeSequences]:
    """Return whether row n of each shard is its sequence n.

    A subclass may have other rows, such as parts of sequences, so the answer is not inherited.
    """
    return type(items) in (LabeledItems, NextTokenItems)


def _count_sections(items: WholeSequences, limits: BatchLimits, *, has_budget: bool) -> int:
    sequences = items.sequences
    num_batches = max(sequences.num_steps / limits.budget, sequences.num_sequences / limits.max_rows)
    longest_rows = min(limits.budget // max(1, items.longest), limits.max_rows)
    num_sections = count_sections(_num_bytes(sequences), num_batches, longest_rows)
    # Without a budget, `max_rows` is the batch size, so no row of it may be lost by rounding.
    while not has_budget and limits.max_rows % num_sections:
        num_sections //= 2
    has_batches = _max_batches_per_pool(items, limits, num_sections) >= _MIN_SECTION_BATCHES_PER_POOL
    return num_sections if has_batches else 1


def _max_batches_per_pool(items: Items, limits: BatchLimits, num_sections: int) -> int:
    return min(_MAX_ROWS_OF_SECTIONS, num_sections * _MAX_ROWS_PER_SECTION) // _batch_rows(items, limits)


def _batch_rows(items: Items, limits: BatchLimits) -> int:
    """Return the approximate number of rows of a batch."""
    return int(min(limits.budget / max(items.mean_length, 1), limits.max_rows)) + 1


def _num_bytes(sequences: Sequences) -> int:
    return sum(file.num_bytes for file in sequences.store.files)


def _many_sections(
    items: WholeSequences, limits: BatchLimits, seed: int, num_sections: int, *, has_budget: bool
) -> BatchOrder:
    max_batches = _max_batches_per_pool(items, limits, num_sections)
    limits = BatchLimits(limits.budget // num_sections, limits.max_rows // num_sections, limits.row_multiple)
    source: UnitSource = RowUnits(items)
    batch_units, longest_units = limits.max_rows, 1
    if has_budget:
        # A batch has no room for more than `max_rows`, however short. So each row counts as some time steps more.
        per_row = 0 if limits.max_rows >= limits.budget else -(-limits.budget // limits.max_rows)
        source, batch_units, longest_units = StepUnits(items, per_row), limits.budget, items.sequences.longest + per_row
    num_batches = max(_SECTION_BATCHES_PER_POOL, _MIN_ROWS_PER_SECTION // _batch_rows(items, limits))
    pool_units = batch_units * min(num_batches, max_batches)
    group_units = GROUP_BYTES * sum(source.shard_units) // (_num_bytes(items.sequences) * num_sections)
    max_runs = min(_RUNS_PER_POOL // num_sections, pool_units // (_MIN_ROWS_PER_RUN * longest_units))
    pools = ShufflePools(source, seed, pool_units, num_sections, max(1, max_runs), max(1, group_units))
    # The last row of a run may extend beyond the run.
    max_units = pools.num_runs * (pools.max_run_units + longest_units - 1)
    if has_budget:
        return BatchOrder(pools, limits, count_batches(max_units, max(1, items.longest), limits))
    return BatchOrder(pools, limits, -(-max_units // limits.max_rows))


def _one_section(items: Items, limits: BatchLimits, seed: int) -> BatchOrder:
    batch_rows, num_rows = _batch_rows(items, limits), sum(items.shard_sizes)
    if isinstance(items, StoredItems):
        group_rows = GROUP_BYTES * num_rows // _num_bytes(items.sequences)
    else:
        group_rows = _SHARDS_PER_GROUP * num_rows // len(items.shard_sizes)
    pool_rows = min(_BATCHES_PER_POOL * batch_rows, max(_MAX_ROWS_PER_POOL, _MIN_BATCHES_PER_POOL * batch_rows))
    max_runs = max(_BATCHES_PER_POOL, min(_RUNS_PER_POOL, pool_rows // _MAX_RUN_ROWS))
    return BatchOrder(ShufflePools(RowUnits(items), seed, pool_rows, 1, max_runs, max(1, group_rows)), limits)
