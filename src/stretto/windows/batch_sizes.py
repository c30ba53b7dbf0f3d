"""Batch sizes: how a dataset's rows are cut into sections, pools and runs for batches of a given size."""

from typing import TypeGuard

from stretto.windows.batch_order import BatchLimits, BatchOrder, count_batches
from stretto.windows.items import Items, NextTokenItems, StoredItems
from stretto.windows.labeled_items import LabeledItems
from stretto.windows.row_units import RowUnits, StepUnits, UnitSource
from stretto.windows.sections import count_sections
from stretto.windows.shuffle_pools import GROUP_BYTES, ShufflePools

# With this many batches per pool, lengths within a batch typically differ by a few percent.
_BATCHES_PER_POOL = 64
# A pool is packed as a whole, so it has at most about this many rows, or _MIN_BATCHES_PER_POOL batches if that is more.
_MAX_ROWS_PER_POOL = 1 << 18
_MIN_BATCHES_PER_POOL = 4
# With sections: enough rows in a section's part of a pool that all sections' parts of a batch have similar lengths,
_MIN_ROWS_PER_SECTION = 1 << 14
# and so many batches that the upper bound on their number is close to what is needed.
_SECTION_BATCHES_PER_POOL = 128
# The runs of a pool, in all sections together: from so many places of the data its rows come.
_RUNS_PER_POOL = 512
_MAX_RUN_ROWS = 1024
# Rows that are not in a store are shuffled within as many shards.
_SHARDS_PER_GROUP = 8
# With sections, a run has at least this many times the longest row's time steps, so that runs are about equally large.
_MIN_ROWS_PER_RUN = 128


def arrange_batches(items: Items, limits: BatchLimits, seed: int, *, has_budget: bool) -> BatchOrder:
    """Return the order of batches within `limits`, for all sections; `has_budget` is False if only rows are limited."""
    batch_rows = int(min(limits.budget / max(items.mean_length, 1), limits.max_rows)) + 1
    num_rows = sum(items.shard_sizes)
    if not isinstance(items, StoredItems):
        return _one_section(items, limits, seed, batch_rows, _SHARDS_PER_GROUP * num_rows // len(items.shard_sizes))
    sequences = items.sequences
    num_bytes = sum(file.num_bytes for file in sequences.store.files)
    group_rows = GROUP_BYTES * num_rows // num_bytes
    if not _is_row_per_sequence(items):
        return _one_section(items, limits, seed, batch_rows, group_rows)
    num_batches = max(sequences.num_steps / limits.budget, sequences.num_sequences / limits.max_rows)
    longest_rows = min(limits.budget // max(1, items.longest), limits.max_rows)
    num_sections = count_sections(num_bytes, num_batches, longest_rows)
    if num_sections == 1:
        return _one_section(items, limits, seed, batch_rows, group_rows)
    limits = BatchLimits(limits.budget // num_sections, limits.max_rows // num_sections, limits.row_multiple)
    return _many_sections(items, limits, seed, num_sections, -(-batch_rows // num_sections), num_bytes, has_budget)


def _many_sections(
    items: LabeledItems | NextTokenItems,
    limits: BatchLimits,
    seed: int,
    num_sections: int,
    part_rows: int,
    num_bytes: int,
    has_budget: bool,
) -> BatchOrder:
    """Return the order for sections; `limits` and `part_rows` are those of a section's part of a batch."""
    source: UnitSource = RowUnits(items)
    part_units, longest_units = limits.max_rows, 1
    if has_budget:
        # A row counts as this many time steps at least, since a batch may have no room for more short rows.
        per_row = 0 if limits.max_rows >= limits.budget else -(-limits.budget // limits.max_rows)
        source, part_units, longest_units = StepUnits(items, per_row), limits.budget, items.sequences.longest + per_row
    batches_per_pool = max(_SECTION_BATCHES_PER_POOL, _MIN_ROWS_PER_SECTION // part_rows)
    pool_units = part_units * max(min(batches_per_pool, _MAX_ROWS_PER_POOL // part_rows), _BATCHES_PER_POOL)
    pools = ShufflePools(
        source,
        seed,
        pool_units,
        num_sections,
        max_runs=max(1, min(_RUNS_PER_POOL // num_sections, pool_units // (_MIN_ROWS_PER_RUN * longest_units))),
        group_units=max(1, GROUP_BYTES * sum(source.shard_units) // (num_bytes * num_sections)),
    )
    # The last row of a run may extend beyond the run.
    max_units = pools.num_runs * (pools.max_run_units + longest_units)
    num_batches = -(-max_units // limits.max_rows)
    if has_budget:
        num_batches = count_batches(max_units, max(1, items.longest), limits)
    return BatchOrder(pools, limits, num_batches)


def _is_row_per_sequence(items: Items) -> TypeGuard[LabeledItems | NextTokenItems]:
    """Return whether row n of each shard is its sequence n.

    A subclass may have other rows, such as parts of sequences, so the answer is not inherited.
    """
    return type(items) in (LabeledItems, NextTokenItems)


def _one_section(items: Items, limits: BatchLimits, seed: int, batch_rows: int, group_rows: int) -> BatchOrder:
    pool_rows = min(_BATCHES_PER_POOL * batch_rows, max(_MAX_ROWS_PER_POOL, _MIN_BATCHES_PER_POOL * batch_rows))
    max_runs = max(_BATCHES_PER_POOL, min(_RUNS_PER_POOL, pool_rows // _MAX_RUN_ROWS))
    return BatchOrder(ShufflePools(RowUnits(items), seed, pool_rows, 1, max_runs, max(1, group_rows)), limits)
