from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.data import Position
from stretto.errors import DataError
from stretto.store.sequences import IntArray
from stretto.windows.batch_order import BatchLimits, BatchOrder, assign_rows, pack
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


orders = st.builds(
    lambda shards, seed, pool_rows, budget, rows, row_multiple: BatchOrder(
        ShufflePools(ListedLengths(tuple(map(tuple, shards))), seed, pool_rows), BatchLimits(budget, rows, row_multiple)
    ),
    shards=st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=60), min_size=1, max_size=20),
    seed=st.integers(0, 2**63 - 1),
    pool_rows=st.integers(1, 400),
    budget=st.integers(50, 600),
    rows=st.integers(1, 40),
    row_multiple=st.integers(1, 9),
)


def epoch(order: BatchOrder, number: int) -> list[RowTable]:
    """All batches of an epoch."""
    batches, position = [], Position(number)
    while position.epoch == number:
        batches.append(order.batch(position))
        position = order.next_position(position)
    assert position == Position(number + 1)
    return batches


def rows(batches: list[RowTable]) -> list[tuple[int, int]]:
    return [row for batch in batches for row in zip(batch.shards.tolist(), batch.indices.tolist(), strict=True)]


@given(order=orders, number=st.integers(0, 1000))
@EXAMPLES
def test_each_sequence_comes_exactly_once_per_epoch_and_no_batch_exceeds_its_limits(
    order: BatchOrder, number: int
) -> None:
    batches = epoch(order, number)
    source = order.pools.source
    expected = {(shard, row) for shard, size in enumerate(source.shard_sizes) for row in range(size)}
    actual = rows(batches)
    assert len(actual) == len(set(actual)) and set(actual) == expected
    for batch in batches:
        lengths = [int(source.lengths(s, n, n + 1)[0]) for s, n in rows([batch])]
        assert lengths == batch.lengths.tolist() == sorted(lengths, reverse=True)
        assert 0 < len(lengths) <= order.limits.max_rows
        assert len(lengths) * lengths[0] <= order.limits.budget


@given(order=orders, number=st.integers(0, 5), data=st.data())
@EXAMPLES
def test_any_position_can_be_read_directly(order: BatchOrder, number: int, data: st.DataObject) -> None:
    positions = [Position(number)]
    while (position := order.next_position(positions[-1])).epoch == number:
        positions.append(position)
    chosen = data.draw(st.sampled_from(positions))
    # A new object with empty caches: a rank that starts here.
    other = BatchOrder(ShufflePools(order.pools.source, order.pools.seed, order.pools.pool_rows), order.limits)
    for one, two in zip(order.batch(chosen), other.batch(chosen), strict=True):
        assert (one == two).all()
    parts = [order.fraction(position) for position in positions]
    assert parts == sorted(parts) and parts[0] == 0 and parts[-1] < 1


def test_epochs_and_seeds_differ_in_their_order_and_their_batches() -> None:
    source = ListedLengths(tuple(tuple(10 + (7 * s + n) % 13 for n in range(200)) for s in range(6)))
    seen = {
        tuple(rows(epoch(BatchOrder(ShufflePools(source, seed, 300), BatchLimits(200, 50)), number)))
        for seed in (1, 2)
        for number in (0, 1)
    }
    assert len(seen) == 4


def test_a_pool_mixes_runs_from_many_shards() -> None:
    source = ListedLengths(tuple((9,) * 10_000 for _ in range(4)))
    pools = ShufflePools(source, 1, 2_000)
    first = pools.rows(0, 0)
    assert set(first.shards.tolist()) == {0, 1, 2, 3}
    # In contiguous runs, which can be read in one piece.
    runs = 1 + np.count_nonzero((np.diff(first.indices) != 1) | (np.diff(first.shards) != 0))
    assert 32 <= runs <= 80


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


@given(num_rows=st.integers(1, 200), count=st.integers(1, 20))
def test_a_batch_is_split_completely_into_nearly_equal_shares(num_rows: int, count: int) -> None:
    shares = [assign_rows(num_rows, index, count) for index in range(count)]
    assert sorted(np.concatenate(shares).tolist()) == list(range(num_rows))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    lengths = np.arange(num_rows, 0, -1)
    steps = [int(lengths[share].sum()) for share in shares]
    assert max(steps) - min(steps) <= num_rows, "at most the longest row"


def test_a_permutation_never_changes_with_a_library() -> None:
    assert permutation(7, 10).tolist() == [1, 8, 5, 7, 0, 9, 4, 6, 3, 2]


def test_positions_that_do_not_exist_are_refused() -> None:
    order = BatchOrder(ShufflePools(ListedLengths(((3, 4),)), 1, 10), BatchLimits(10, 10))
    for position in (Position(-1), Position(0, 1), Position(0, 0, 5), Position(0, 0, -1)):
        with pytest.raises(DataError, match="does not exist"):
            order.batch(position)
    with pytest.raises(DataError, match="must all be at least 1"):
        BatchLimits(0, 1)
