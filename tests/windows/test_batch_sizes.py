"""How large data is cut into sections and pools: figures that follow from the index alone."""

from collections.abc import Sequence

import numpy as np
import pytest

from stretto.data import Batches, LabeledItems
from stretto.store.index import Store
from stretto.store.pages import ByteArray, ByteRange, PagedFile
from stretto.store.sequences import Sequences, SequencesFields, shard_file

NUM_SHARDS = 1000
SHARD_ROWS = 1_000_000


class NoPages:
    """Pages that are never read."""

    def read(self, byte_ranges: Sequence[ByteRange]) -> list[ByteArray]:
        raise AssertionError(f"{byte_ranges} was read")


def items(mean_length: int, longest: int) -> LabeledItems:
    """10^9 rows, of which there is only an index."""
    shard = {"num_sequences": SHARD_ROWS, "num_steps": SHARD_ROWS * mean_length, "longest": longest}
    fields = {
        "values": {"type": "tokens", "num_tokens": 60_000},
        "targets": {"type": "classes", "names": ["a", "b"]},
        "shards": [shard] * NUM_SHARDS,
    }
    sizes = {"values": 2 * mean_length * SHARD_ROWS, "targets": 4 * SHARD_ROWS, "ends": 8 * SHARD_ROWS}
    files = [
        PagedFile(shard_file(prefix, number), size, np.zeros(0, np.uint32))
        for number in range(NUM_SHARDS)
        for prefix, size in sizes.items()
    ]
    store = Store("index only", SequencesFields.kind, fields, tuple(files), NoPages(), "")
    return LabeledItems(Sequences(store, SequencesFields.model_validate(fields), None))


@pytest.mark.parametrize("replicas", [64, 256, 1024, 4096])
def test_batches_of_sections_are_not_much_smaller_than_the_budget(replicas: int) -> None:
    budget = 4096 * replicas
    order = Batches(items(55, 500), budget).order
    assert order.pools.num_sections == min(512, replicas // 4), "a node of eight replicas has a section of its own"
    assert order.num_batches is not None
    num_batches = order.num_batches * order.pools.num_pools
    assert num_batches / (NUM_SHARDS * SHARD_ROWS * 55 / budget) < 1.12


@pytest.mark.parametrize(("mean_length", "longest"), [(1, 2), (10, 400), (10, 1_000_000), (55, 500), (400, 9_000)])
@pytest.mark.parametrize("budget", [1 << 18, 1 << 22, 1 << 24, 1 << 26])
def test_a_pool_fits_into_memory_even_if_one_process_reads_all_sections(
    mean_length: int, longest: int, budget: int
) -> None:
    pools = Batches(items(mean_length, min(longest, budget)), budget).order.pools
    rows_per_unit = NUM_SHARDS * SHARD_ROWS / pools.num_units
    pool_rows = pools.pool_units * rows_per_unit
    if pools.num_sections == 1:
        assert pool_rows <= max(1 << 18, 4 * (budget / mean_length + 1))
    else:
        assert pool_rows <= 1 << 20 and pool_rows * pools.num_sections <= 1 << 25


@pytest.mark.parametrize("max_rows", [1 << 16, 3 << 12, 50_000, 65_537])
def test_without_a_budget_sections_divide_the_batch_size(max_rows: int) -> None:
    order = Batches(items(55, 500), max_rows=max_rows).order
    assert order.limits.max_rows * order.pools.num_sections == max_rows
    if order.pools.num_sections > 1:
        assert order.num_batches is not None
        assert order.num_batches * order.pools.num_pools <= 1.05 * NUM_SHARDS * SHARD_ROWS / max_rows
    assert (order.pools.num_sections == 1) == (max_rows % 2 == 1)
