"""Rows that are parts of sequences: sliding windows, and labeled sequences that are cut."""

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.made_up_stores import CHANNELS, UniformPages, sequences
from helpers.small_sections import small_sections
from helpers.stores import write_series, write_tokens
from stretto.data import Batches, ForecastTransform, Position, SlidingWindows
from stretto.windows.batch_sizes import has_parts
from stretto.windows.items import PartItems
from stretto.windows.labeled_items import CutLabeledItems
from stretto.windows.row_units import StepUnits

EXAMPLES = settings(max_examples=60, deadline=None)

# Of equal lengths, there are as many windows as there can be.
shards = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=20), min_size=1, max_size=3) | st.lists(
    st.integers(5, 40).flatmap(lambda size: st.just([20] * size)), min_size=1, max_size=3
)


@contextmanager
def parts(lengths: list[list[int]], context: int, stride: int, horizon: int, is_cut: bool) -> Iterator[PartItems]:
    """Rows whose first value is the index of their first time step in the data."""
    with tempfile.TemporaryDirectory() as folder:
        if is_cut:
            steps = iter(range(sum(map(sum, lengths))))
            tokens = [[[next(steps) for _ in range(length)] for length in shard] for shard in lengths]
            labels = [[step for row in shard for step in row] for shard in tokens]
            sequences = write_tokens(Path(folder) / "store", tokens, sum(map(sum, lengths)), labels, per_step=True)
            yield CutLabeledItems(sequences, context=context)
        else:
            values = iter(np.split(np.arange(sum(map(sum, lengths)), dtype=np.float32)[:, None], _edges(lengths)))
            sequences = write_series(Path(folder) / "store", [[next(values) for _ in shard] for shard in lengths])
            transform = ForecastTransform.from_sequences(sequences, horizon, scale=False)
            yield SlidingWindows(sequences, transform, context, stride)


def _edges(lengths: list[list[int]]) -> list[int]:
    return [*accumulate(length for shard in lengths for length in shard)][:-1]


def expected_rows(lengths: list[list[int]], context: int, stride: int, horizon: int, is_cut: bool) -> dict[int, int]:
    """The length of each row by its first time step, from a plain loop."""
    rows: dict[int, int] = {}
    first = 0
    for length in (length for shard in lengths for length in shard):
        if is_cut:
            rows |= {first + start: min(context, length - start) for start in range(0, length, context)}
        else:
            rows |= {first + start: context for start in range(0, length - context - horizon + 1, stride)}
        first += length
    return rows


@given(
    lengths=shards, context=st.integers(1, 9), stride=st.integers(1, 12), horizon=st.integers(1, 3),
    is_cut=st.booleans(), budget=st.none() | st.integers(9, 200), max_rows=st.sampled_from([None, 4, 30]),
    replicas=st.sampled_from([1, 2, 3, 5, 8]), seed=st.integers(0, 9), has_sections=st.booleans(),
)  # fmt: skip
@EXAMPLES
def test_each_part_comes_once_per_epoch_in_the_same_batches_for_any_number_of_replicas(
    lengths: list[list[int]], context: int, stride: int, horizon: int, is_cut: bool, budget: int | None,
    max_rows: int | None, replicas: int, seed: int, has_sections: bool,
) -> None:  # fmt: skip
    expected = expected_rows(lengths, context, stride, horizon, is_cut)
    if (budget is None and max_rows is None) or not expected or sum(map(sum, lengths)) < 2:
        return
    with small_sections(has_sections), parts(lengths, context, stride, horizon, is_cut) as items:
        data = Batches(items, budget, max_rows, 4, seed)
        shares = [data.share(index, replicas) for index in range(replicas)]
        seen: dict[int, int] = {}
        position = Position(3)
        while position.epoch == 3:
            batch: dict[int, int] = {}
            for share in shares:
                window = share.read(position)
                assert window.inputs is not None and window.targets is not None
                for row, length in enumerate(window.lengths.tolist()):
                    values = window.inputs[:length, row].flatten().tolist()
                    assert values == list(range(int(values[0]), int(values[0]) + length)) if length else not values
                    if length:
                        assert int(values[0]) not in batch
                        batch[int(values[0])] = length
                        last_target = window.targets[length - 1, row].flatten()[0]
                        assert int(last_target) == int(values[0]) + length - is_cut, "of the same time steps"
                assert share.next_position(position) == data.next_position(position)
            whole = data.read(position, inputs=False, targets=False)
            assert sorted(batch.values(), reverse=True) == whole.lengths[whole.lengths > 0].tolist()
            assert not batch.keys() & seen.keys()
            assert len(batch) <= (max_rows or len(batch)) and (budget is None or sum(batch.values()) <= budget)
            seen |= batch
            position = data.next_position(position)
        assert seen == expected
        assert data.has_rows(len(expected)) and not data.has_rows(len(expected) + 1)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), context=st.integers(1, 9), stride=st.integers(1, 12),
    per_sequence=st.integers(0, 5), is_cut=st.booleans(), is_spread=st.booleans(),
    edges=st.lists(st.integers(0, 1500), max_size=6),
)  # fmt: skip
@EXAMPLES
def test_the_parts_that_start_between_two_units_are_found(
    lengths: list[int], context: int, stride: int, per_sequence: int, is_cut: bool, is_spread: bool, edges: list[int]
) -> None:
    expected = expected_rows([lengths], context, stride, 1, is_cut)
    if not expected or sum(lengths) < 2:
        return
    with parts([lengths], context, stride, 1, is_cut) as items:
        if is_spread and not is_cut:
            per_sequence = -1
        source = StepUnits(items.sequence_rows, per_sequence, is_spread)
        (size,) = source.shard_units
        assert size == sum(lengths) + per_sequence * len(lengths)
        units, first = {}, 0
        for index, length in enumerate(lengths):
            own = [step for step in expected if first <= step < first + length]
            for number, step in enumerate(own):
                offset = number * (length + per_sequence) // len(own) if is_spread else step - first
                units[step] = first + per_sequence * index + offset
            first += length
        edges = [0, *sorted(edge for edge in edges if edge < size), size]
        for start, stop in pairwise(edges):
            indices, row_lengths = source.rows(0, start, stop)
            between = [step for step in expected if start <= units[step] < stop]
            assert indices.tolist() == between
            assert row_lengths.tolist() == [expected[step] for step in between]
        if not is_cut:
            most = items.sequence_rows.max_density
            for start, stop in combinations(edges, 2) if is_spread and per_sequence == -1 else ():
                assert len(source.rows(0, start, stop)[0]) <= math.ceil((stop - start) * most)
        assert items.shard_sizes == (len(expected),) and items.sequence_rows.approximate_count == len(expected)
        assert items.lengths(0, 0, len(expected)).tolist() == list(expected.values())


def test_windows_of_a_series_of_billions_of_time_steps_are_found() -> None:
    num_steps = 4 * 10**9
    stored = sequences(num_steps, num_steps, UniformPages(num_steps), values=CHANNELS, num_shards=1, shard_rows=1)
    rows = SlidingWindows(stored, ForecastTransform.from_sequences(stored, 24), 96).sequence_rows
    source, num_rows = StepUnits(rows, -1, is_spread=True), num_steps - 119
    for start in (0, 3_100_000_000, num_steps - 1001):
        first, last = (-(-unit * num_rows // (num_steps - 1)) for unit in (start, start + 1000))
        assert source.rows(0, start, start + 1000)[0].tolist() == list(range(first, last))


def test_a_share_reads_the_parts_of_its_own_sections_only() -> None:
    lengths = [[30 + (7 * a + b) % 40 for a in range(300)] for b in range(3)]
    for is_cut in (True, False):
        with small_sections(), parts(lengths, 4, 1, 1, is_cut) as items:
            data = Batches(items, 1024)
            assert data.order.pools.num_sections == 256
            share, position = data.share(5, 64), Position()
            read = 0
            while not position.epoch:
                read += len(share.order.batch(position).lengths)
                position = share.next_position(position)
            assert read == pytest.approx(len(expected_rows(lengths, 4, 1, 1, is_cut)) / 64, rel=0.2)


def test_subclasses_of_parts_keep_their_own_rows(tmp_path: Path) -> None:
    class EverySecond(SlidingWindows):
        """A user's rows: every second window."""

        @property
        def shard_sizes(self) -> list[int]:
            return [-(-size // 2) for size in self.sequence_rows.shard_sizes]

    sequences = write_series(tmp_path / "store", [[np.arange(40, dtype=np.float32)[:, None]] * 5])
    items = EverySecond(sequences, ForecastTransform.from_sequences(sequences), 4)
    assert not has_parts(items) and has_parts(SlidingWindows(sequences, items.forecast, 4))
    with small_sections():
        data = Batches(items, 40)
        assert data.order.pools.num_sections == 1
        num_rows, position = 0, Position()
        while not position.epoch:
            num_rows += data.read(position).num_rows
            position = data.next_position(position)
    assert num_rows == -(-36 * 5 // 2) == data.num_rows
