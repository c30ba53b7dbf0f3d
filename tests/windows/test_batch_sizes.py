"""How large data is cut into sections and pools: figures that follow from the index alone."""

from dataclasses import dataclass

import numpy as np
import pytest

from helpers.made_up_stores import CHANNELS, NUM_SHARDS, SHARD_ROWS, TOKENS, NoPages, UniformPages, sequences
from stretto.data import Batches, DocumentLanes, ForecastTransform, LabeledItems, Position, SlidingWindows, WindowSource
from stretto.store.pages import ByteArray
from stretto.windows.items import PartItems
from stretto.windows.labeled_items import CutLabeledItems


def items(mean_length: int, longest: int) -> LabeledItems:
    return LabeledItems(sequences(mean_length, longest, NoPages()))


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


@pytest.mark.parametrize("max_rows", [1 << 16, 1 << 18])
@pytest.mark.parametrize(("length", "longest"), [(100, 100), (1000, 1000), (9000, 9000), (240, 1000)])
@pytest.mark.parametrize("is_cut", [True, False])
def test_without_a_budget_batches_of_parts_have_the_size_that_was_set(
    max_rows: int, length: int, longest: int, is_cut: bool
) -> None:
    stored = sequences(length, longest, UniformPages(length), values=TOKENS if is_cut else CHANNELS, per_step=is_cut)
    if is_cut:
        parts: PartItems = CutLabeledItems(stored, context=100)
    else:
        parts = SlidingWindows(stored, ForecastTransform.from_sequences(stored, 4), 96)
    order = Batches(parts, max_rows=max_rows).order
    assert order.limits.max_rows * order.pools.num_sections == max_rows
    if length == longest == 9000:
        assert order.pools.num_sections == 512
    if order.pools.num_sections > 1:
        assert order.num_batches is not None
        num_batches = parts.sequence_rows.approximate_count / max_rows
        assert order.num_batches * order.pools.num_pools <= 1.06 * num_batches


@dataclass
class SortedPages(UniformPages):
    """In each shard, the first 99 of 100 sequences have one time step, and the others are long."""

    def _read(self, name: str, start: int, stop: int) -> ByteArray:
        numbers = np.arange(start // 8 + 1, stop // 8 + 1)
        num_short = SHARD_ROWS * 99 // 100
        content: ByteArray = (
            (numbers + (self.length - 1) * np.maximum(0, numbers - num_short)).astype("<u8").view(np.uint8)
        )
        return content


@pytest.mark.parametrize("length", [101, 1001, 100_001])
def test_pools_fit_into_memory_even_if_the_sampled_series_have_no_windows(length: int) -> None:
    stored = sequences((99 + length) // 100, length, SortedPages(length), values=CHANNELS)
    items = SlidingWindows(stored, ForecastTransform.from_sequences(stored, 4), 96)
    num_rows = NUM_SHARDS * SHARD_ROWS // 100 * (length - 99)
    order = Batches(items, 96 * 512).order
    assert num_rows / order.pools.num_pools <= 1.05 * 16 * 64 * 513


def test_parts_in_many_shards_are_not_counted_one_by_one() -> None:
    pages = UniformPages(10_000)
    stored = sequences(10_000, 10_000, pages, values=CHANNELS, num_shards=60_000, shard_rows=16)
    data = Batches(SlidingWindows(stored, ForecastTransform.from_sequences(stored, 24), 96), 4096 * 4096)
    assert read_first(data, pages) > 20


def read_first(windows: WindowSource, pages: UniformPages) -> int:
    """Read the first window as one of 4,096 replicas does; return the number of its rows."""
    share = windows.share(1234, 4096)
    window = share.read(Position())
    share.next_position(Position())
    # In total, there are 8 GB of ends in 1,000 files.
    assert pages.num_bytes < 48 << 20
    assert len(pages.files) < 16
    return int((window.lengths > 0).sum())


@pytest.mark.parametrize(
    ("length", "longest", "num_sections", "most"),
    [(1200, 9000, 512, 1.2), (130, 131, 512, 1.2), (240, 1000, 512, 1.9), (130, 1000, 1, 0)],
)
def test_the_first_windows_of_a_billion_series_take_few_of_their_lengths(
    length: int, longest: int, num_sections: int, most: float
) -> None:
    pages = UniformPages(length)
    stored = sequences(length, longest, pages, values=CHANNELS)
    data = Batches(SlidingWindows(stored, ForecastTransform.from_sequences(stored, 24), 96), 4096 * 4096)
    assert str(data).startswith("about ") and data.has_rows(4096)
    assert pages.num_bytes < 5 << 20, "a page of five shards"
    assert data.order.pools.num_sections == num_sections
    assert read_first(data, pages) > 20
    if num_sections > 1:
        assert data.order.num_batches is not None
        num_batches = data.order.num_batches * data.order.pools.num_pools
        assert num_batches / (NUM_SHARDS * SHARD_ROWS * (length - 119) * 96 / (4096 * 4096)) < most
        small = Batches(data.items, 4096 * 512)
        assert (small.order.pools.num_sections == 1) == (most > 1.5), "batches that fit into memory are not smaller"


def test_the_first_batch_of_a_billion_sequences_that_are_cut_takes_few_of_their_lengths() -> None:
    pages = UniformPages(1050)
    stored = sequences(1050, 1050, pages, per_step=True)
    data = Batches(CutLabeledItems(stored, context=100), 4096 * 4096)
    assert data.order.pools.num_sections == 512
    assert read_first(data, pages) > 20
    assert data.order.num_batches is not None
    assert data.order.num_batches * data.order.pools.num_pools / (stored.num_steps / (4096 * 4096)) < 1.12


@pytest.mark.parametrize("lanes", [1_000_000, 1_000_001])
@pytest.mark.parametrize(
    ("length", "longest", "most"), [(20, 20, 1.1), (65, 65, 1.1), (100, 400, 1.5), (3500, 14_000, 1.1)]
)
def test_a_million_lanes_have_sections_whatever_the_length_of_their_documents(
    lanes: int, length: int, longest: int, most: float
) -> None:
    pages = UniformPages(length)
    data = DocumentLanes(sequences(length, longest, pages), lanes, 64)
    assert data.order.pools.num_sections == 512
    assert read_first(data, pages) == 244
    assert data.order.num_windows is not None
    num_windows = data.order.num_windows * data.order.pools.num_pools
    assert num_windows / (NUM_SHARDS * SHARD_ROWS * -(-(length - 1) // 64) / lanes) < most
    pools = data.order.pools
    num_documents = pools.pool_units * NUM_SHARDS * SHARD_ROWS / pools.num_units
    assert 16 * lanes / 512 < num_documents * max(1, length // 64) and num_documents * 512 <= 1 << 25


def test_fewer_lanes_of_short_documents_have_one_section() -> None:
    # Sections would need nearly twice as many windows as the documents have.
    assert DocumentLanes(sequences(65, 500, UniformPages(65)), 10**6, 64).order.pools.num_sections == 1
    assert DocumentLanes(sequences(100, 100, NoPages()), 1 << 17, 64).order.pools.num_sections == 1
    assert DocumentLanes(sequences(1100, 1100, NoPages()), 1 << 17, 64).order.pools.num_sections == 512
    assert DocumentLanes(sequences(1100, 1100, NoPages()), 1000, 64).order.pools.num_sections == 16
    assert DocumentLanes(sequences(1100, 1100, NoPages()), 1024, 64).order.pools.num_sections == 128
