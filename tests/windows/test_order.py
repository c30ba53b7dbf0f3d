"""The order of rows: pools, sections, batches, and how they are divided."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.stores import write_tokens
from stretto.data import Position
from stretto.errors import DataError
from stretto.store.sequences import IntArray
from stretto.windows.batch_order import BatchLimits, BatchOrder, _log_bound, count_batches, pack
from stretto.windows.document_order import DocumentOrder
from stretto.windows.row_units import RowUnits, StepUnits
from stretto.windows.sections import Division, count_sections
from stretto.windows.sequence_rows import SequenceRows
from stretto.windows.shuffle import permutation
from stretto.windows.shuffle_pools import RowTable, ShufflePools

EXAMPLES = settings(max_examples=150, deadline=None)


@dataclass(frozen=True)
class ListedLengths:
    """Lengths in memory."""

    shards: tuple[tuple[int, ...], ...]

    @property
    def shard_sizes(self) -> Sequence[int]:
        return [len(shard) for shard in self.shards]

    def lengths(self, shard: int, start: int, stop: int) -> IntArray:
        return np.array(self.shards[shard][start:stop], np.int64)


@dataclass(frozen=True)
class ListedSteps:
    """The same, measured in time steps, and some more per row."""

    source: ListedLengths
    per_row: int = 0

    @property
    def shard_units(self) -> Sequence[int]:
        return [sum(shard) + self.per_row * len(shard) for shard in self.source.shards]

    def rows(self, shard: int, start: int, stop: int) -> tuple[IntArray, IntArray]:
        starts = np.cumsum([0, *self.source.shards[shard]])[:-1] + self.per_row * np.arange(
            len(self.source.shards[shard])
        )
        first, last = (int(np.searchsorted(starts, unit)) for unit in (start, stop))
        return np.arange(first, last), self.source.lengths(shard, first, last)


shard_lists = st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=60), min_size=1, max_size=20)


@st.composite
def one_section(draw: st.DrawFn) -> BatchOrder:
    source = RowUnits(ListedLengths(tuple(map(tuple, draw(shard_lists)))))
    group = draw(st.none() | st.integers(1, 500))
    pools = ShufflePools(source, draw(st.integers(0, 2**63 - 1)), draw(st.integers(1, 400)), group_units=group)
    limits = BatchLimits(draw(st.integers(50, 600)), draw(st.integers(1, 40)), draw(st.integers(1, 9)))
    return BatchOrder(pools, limits)


@st.composite
def many_sections(draw: st.DrawFn) -> BatchOrder:
    """Any number of sections; their parts have as many batches as `count_batches` says."""
    shards = draw(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=60), min_size=1, max_size=20))
    limits = BatchLimits(draw(st.integers(50, 600)), draw(st.integers(1, 700)), draw(st.integers(1, 9)))
    per_row = 0 if limits.max_rows >= limits.budget else -(-limits.budget // limits.max_rows)
    source = ListedSteps(ListedLengths(tuple(map(tuple, shards))), per_row)
    num_sections, runs = draw(st.integers(1, 9)), draw(st.integers(1, 20))
    group = draw(st.none() | st.integers(1, 5000))
    pools = ShufflePools(source, draw(st.integers(0, 99)), draw(st.integers(1, 9000)), num_sections, runs, group)
    longest = max(map(max, shards))
    num_batches = count_batches(pools.num_runs * (pools.max_run_units + longest + per_row), longest, limits)
    return BatchOrder(pools, limits, num_batches)


def listed(order: BatchOrder) -> ListedLengths:
    source = order.pools.source
    assert isinstance(source, RowUnits | ListedSteps) and isinstance(source.source, ListedLengths)
    return source.source


def parts(order: BatchOrder, number: int) -> list[list[RowTable]]:
    """The sections' parts of all batches of an epoch."""
    batches, position = [], Position(number)
    while position.epoch == number:
        batches.append(order.parts(position))
        position = order.next_position(position)
    assert position == Position(number + 1)
    return batches


def epoch(order: BatchOrder, number: int) -> list[RowTable]:
    return [part for batch in parts(order, number) for part in batch]


def rows(batches: list[RowTable]) -> list[tuple[int, int]]:
    return [row for batch in batches for row in batch.row_ids()]


@given(order=one_section() | many_sections(), number=st.integers(0, 1000))
@EXAMPLES
def test_each_sequence_comes_exactly_once_per_epoch_and_no_batch_exceeds_its_limits(
    order: BatchOrder, number: int
) -> None:
    batches = epoch(order, number)
    source = listed(order)
    expected = {(shard, row) for shard, size in enumerate(source.shard_sizes) for row in range(size)}
    actual = rows(batches)
    assert len(actual) == len(set(actual)) and set(actual) == expected
    for batch in batches:
        lengths = [int(source.lengths(s, n, n + 1)[0]) for s, n in rows([batch])]
        assert lengths == batch.lengths.tolist() == sorted(lengths, reverse=True)
        assert (order.num_batches is not None or lengths) and len(lengths) <= order.limits.max_rows
        assert len(lengths) * max(lengths, default=0) <= order.limits.budget


@given(order=one_section() | many_sections(), number=st.integers(0, 5), data=st.data())
@EXAMPLES
def test_any_position_can_be_read_directly(order: BatchOrder, number: int, data: st.DataObject) -> None:
    positions = [Position(number)]
    while (position := order.next_position(positions[-1])).epoch == number:
        positions.append(position)
    chosen = data.draw(st.sampled_from(positions))
    # A new object with empty caches: a rank that starts here, and reads one section only.
    section = data.draw(st.sampled_from(order.sections))
    other = replace(order, pools=replace(order.pools), own_sections=range(section, section + 1))
    for one, two in zip(order.parts(chosen)[section], other.batch(chosen), strict=True):
        assert (one == two).all()
    assert other.next_position(chosen) == order.next_position(chosen)
    fractions = [order.fraction(position) for position in positions]
    assert fractions == sorted(fractions) and fractions[0] == 0 and fractions[-1] < 1


def test_epochs_and_seeds_differ_in_their_order_and_their_batches() -> None:
    source = RowUnits(ListedLengths(tuple(tuple(10 + (7 * s + n) % 13 for n in range(200)) for s in range(6))))
    seen = {
        tuple(rows(epoch(BatchOrder(ShufflePools(source, seed, 300), BatchLimits(200, 50)), number)))
        for seed in (1, 2)
        for number in (0, 1)
    }
    assert len(seen) == 4


def test_a_pool_mixes_runs_from_many_shards() -> None:
    source = RowUnits(ListedLengths(tuple((9,) * 10_000 for _ in range(4))))
    pools = ShufflePools(source, 1, 2_000)
    first = pools.rows(0, 0)
    assert set(first.shards.tolist()) == {0, 1, 2, 3}
    # In contiguous runs, which can be read in one piece.
    runs = 1 + np.count_nonzero((np.diff(first.indices) != 1) | (np.diff(first.shards) != 0))
    assert 32 <= runs <= 80


def test_the_groups_of_a_pool_are_neighbors() -> None:
    source = RowUnits(ListedLengths(tuple((9,) * 1_000 for _ in range(40))))
    pools = ShufflePools(source, 1, 500, num_sections=2, max_runs=16, group_units=4_000)
    for pool in range(pools.num_pools):
        for section in range(2):
            assert len(set(pools.rows(0, pool, section).shards.tolist())) <= 5, "four shards, or parts of five"


def test_sections_of_different_lengths_have_equal_time_steps() -> None:
    generator = np.random.default_rng(1)
    shards = tuple(tuple(generator.integers(1, 20 * (s + 1), 2_000).tolist()) for s in range(8))
    pools = ShufflePools(ListedSteps(ListedLengths(shards)), 1, 10_000, num_sections=8, max_runs=4)
    limits = BatchLimits(2_000, 2_000, 1)
    num_batches = count_batches(pools.num_runs * (pools.max_run_units + 160), 160, limits)
    batches = parts(BatchOrder(pools, limits, num_batches), 0)
    steps = np.array([[len(part.lengths) * int(part.lengths.max(initial=0)) for part in batch] for batch in batches])
    assert steps.sum(0).max() / steps.sum(0).mean() < 1.03
    assert (steps.max(1) / steps.mean(1)).mean() < 1.35, "five parts per pool only, so rounding counts"


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=300), budget=st.integers(60, 500))
@EXAMPLES
def test_packing_needs_no_more_batches_than_greedy_filling(lengths: list[int], budget: int) -> None:
    descending = np.array(sorted(lengths, reverse=True))
    limits = BatchLimits(budget, 1000, 1)
    greedy, start = 0, 0
    while start < len(descending):
        start += budget // int(descending[start])
        greedy += 1
    assert len(pack(descending, limits)) - 1 == greedy


def test_the_last_batch_of_a_pool_is_not_much_smaller() -> None:
    edges = pack(np.full(1010, 10), BatchLimits(1000, 1000, 8))
    assert np.diff(edges).tolist() == [96] * 10 + [50]
    edges = pack(np.full(1001, 10), BatchLimits(1000, 1000, 1))
    assert np.diff(edges).min() >= 88, "not ten batches of 100 and one of a single row"


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=300), budget=st.integers(60, 500),
    max_rows=st.integers(1, 600), multiple=st.integers(1, 9), extra=st.integers(0, 5),
)  # fmt: skip
@EXAMPLES
def test_the_number_of_batches_is_known_from_the_sum_of_all_lengths(
    lengths: list[int], budget: int, max_rows: int, multiple: int, extra: int
) -> None:
    descending, limits = np.array(sorted(lengths, reverse=True)), BatchLimits(budget, max_rows, multiple)
    least = max(1.0, budget / max_rows)
    longest = max(1, int(descending[0]))
    num_batches = count_batches(int(np.ceil(np.maximum(descending, least).sum())), longest, limits)
    edges = pack(descending, limits, num_batches + extra)
    assert len(edges) == num_batches + extra + 1 and edges[0] == 0 and edges[-1] == len(lengths)
    for start, stop in pairwise(edges.tolist()):
        assert 0 <= stop - start <= max_rows
        assert start == stop or (stop - start) * descending[start] <= budget


def test_rows_that_halve_from_batch_to_batch_need_no_more_batches_than_known() -> None:
    # The worst case for padding: one long row in each batch, and the others as short as the next batch's longest.
    lengths = [length for long in (64, 32, 16, 8, 4, 2) for length in [long, *[long // 2] * (640 // long - 1)]]
    limits = BatchLimits(640, 640, 1)
    num_batches = count_batches(sum(lengths), 64, limits)
    assert len(pack(np.array(lengths), limits)) - 1 == 6 <= num_batches
    assert len(pack(np.array(lengths), limits, num_batches)) - 1 == num_batches


@given(num_rows=st.integers(1, 200), sections=st.integers(1, 20), count=st.integers(1, 50))
def test_a_batch_is_split_completely_into_nearly_equal_shares(num_rows: int, sections: int, count: int) -> None:
    shares = [Division(sections, count).share(index) for index in range(count)]
    for section in range(sections):
        own = [part.rows(num_rows) for share in shares for part in share if part.section == section]
        assert sorted(np.concatenate(own).tolist()) == list(range(num_rows))
    for share in shares:
        assert [part.section for part in share] == list(range(share[0].section, share[-1].section + 1))
        # Whole sections in between, so a replica reads a part of two sections at most.
        assert all(len(part.slots) == part.num_slots for part in share[1:-1])
    # The number of rows may be off by one per slot.
    sizes = [sum(len(part.rows(num_rows)) for part in share) for share in shares]
    slots = max(len(part.slots) for share in shares for part in share) * 2 if sections % count else 1
    assert max(sizes) - min(sizes) <= slots


@given(num_rows=st.integers(1, 200), count=st.integers(1, 20))
def test_shares_of_one_section_have_equal_time_steps(num_rows: int, count: int) -> None:
    shares = [Division(1, count).share(index)[0].rows(num_rows) for index in range(count)]
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    lengths = np.arange(num_rows, 0, -1)
    steps = [int(lengths[share].sum()) for share in shares]
    assert max(steps) - min(steps) <= num_rows, "at most the longest row"


def test_small_data_and_small_batches_have_one_section() -> None:
    assert count_sections(1 << 40, 1e6, 1 << 20) == 512
    assert count_sections(1 << 30, 1e6, 1 << 20) == 32
    assert count_sections(1 << 40, 1e6, 15) == 8
    assert count_sections(1 << 40, 63, 1 << 20) == count_sections(1 << 25, 1e6, 1 << 20) == 1
    assert count_sections(1 << 40, 1e6, 0) == 1


def test_a_permutation_never_changes_with_a_library() -> None:
    assert permutation(7, 10).tolist() == [1, 8, 5, 7, 0, 9, 4, 6, 3, 2]


def test_positions_that_do_not_exist_are_refused() -> None:
    order = BatchOrder(ShufflePools(RowUnits(ListedLengths(((3, 4),))), 1, 10), BatchLimits(10, 10))
    for position in (Position(-1), Position(0, 1), Position(0, 0, 5), Position(0, 0, -1)):
        with pytest.raises(DataError, match="does not exist"):
            order.batch(position)
    with pytest.raises(DataError, match="must all be at least 1"):
        BatchLimits(0, 1)


def test_orders_whose_sections_would_disagree_are_refused() -> None:
    pools = ShufflePools(ListedSteps(ListedLengths(((3, 4) * 9,))), 1, 10, num_sections=2, max_runs=1)
    limits = BatchLimits(8, 8)
    with pytest.raises(DataError, match="num_batches=None is not the same in each of the 2 sections"):
        BatchOrder(pools, limits)
    with pytest.raises(DataError, match=r"own_sections=range\(1, 3\) are not in range\(0, 2\)"):
        BatchOrder(pools, limits, 9, range(1, 3))
    with pytest.raises(DataError, match=r"num_batches=1 is less than the \d+ that are needed"):
        BatchOrder(pools, limits, 1).batch(Position())
    with pytest.raises(DataError, match="num_windows=None is not the same in each of the 2 sections"):
        DocumentOrder(pools, 4, 2, range(4))
    with pytest.raises(DataError, match="lanes=1 is less than the 2 sections; use as many or more"):
        DocumentOrder(pools, 1, 2, range(1), 9)
    with pytest.raises(DataError, match=r"own_lanes=range\(0, 0\) are not in range\(0, 4\)"):
        DocumentOrder(pools, 4, 2, range(0), 9)


@given(ratio=st.fractions(min_value=1, max_value=2**40))
def test_the_bound_of_a_logarithm_is_close_and_above(ratio: Fraction) -> None:
    bound = _log_bound(ratio)
    assert 0 <= float(bound) - math.log(ratio) < 0.05


def test_a_section_without_rows_in_a_pool_names_one_of_its_own(tmp_path: Path) -> None:
    stored = write_tokens(tmp_path / "store", [[[0] * 100, *[[0]] * 50, [0] * 50]], 9)
    pools = ShufflePools(StepUnits(SequenceRows(stored)), 1, 10, num_sections=2, max_runs=1)
    assert pools.num_pools == 10
    for pool in range(10):
        assert pools.any_row(0, pool, 0).row_ids() == [(0, 0)], "the only one that starts in section 0"
        assert pools.any_row(0, pool, 1).row_ids()[0][1] > 0
    num_read = []
    with patch.object(StepUnits, "rows", lambda *arguments: num_read.append(arguments)):
        pools.any_row(0, 9, 0)
    assert not num_read, "a pool's batches all take the same"
