"""Batches: one global order, shares of it, and positions that mean the same on every rank."""

import pickle
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.small_sections import small_sections
from helpers.stores import write_tokens
from stretto.data import Batches, LabeledItems, NextTokenItems, Position, Window, from_arrays, read_ahead
from stretto.errors import DataError
from stretto.store import sequences as sequences_module
from stretto.store.sequences import IntArray, Sequences, StepRange
from stretto.windows.items import RowId
from stretto.windows.row_units import StepUnits
from stretto.windows.sequence_rows import SequenceRows

EXAMPLES = settings(max_examples=60, deadline=None)

rows = st.lists(st.integers(0, 9), min_size=1, max_size=30)
shards = st.lists(st.lists(rows, min_size=1, max_size=25), min_size=1, max_size=4)


@contextmanager
def batches(
    shards: list[list[list[int]]], budget: int | None, seed: int, limit: int = 1000, is_labeled: bool = True
) -> Iterator[Batches]:
    """Batches of sequences that are numbered by their labels."""
    first = [sum(map(len, shards[:index])) for index in range(len(shards))]
    labels = [list(range(start, start + len(shard))) for start, shard in zip(first, shards, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        sequences = write_tokens(Path(folder) / "store", shards, 10, labels)
        yield Batches((LabeledItems if is_labeled else NextTokenItems)(sequences), budget, limit, 4, seed)


def by_label(window: Window) -> dict[int, list[int]]:
    """The sequences of a window by label; each has its target at its last step only."""
    assert window.inputs is not None and window.targets is not None
    sequences = {}
    for row, length in enumerate(window.lengths.tolist()):
        target_steps = (window.targets[:, row] != -100).nonzero().flatten().tolist()
        assert target_steps == ([length - 1] if length else [])
        if length:
            sequences[int(window.targets[length - 1, row])] = window.inputs[:length, row].tolist()
    return sequences


@given(
    shards=shards, budget=st.none() | st.integers(30, 200), seed=st.integers(0, 99), replicas=st.integers(1, 5),
    micro_batches=st.integers(1, 4), max_rows=st.sampled_from([3, 20, 1000]), has_sections=st.booleans(),
)  # fmt: skip
@EXAMPLES
def test_each_sequence_comes_once_per_epoch_in_the_same_batches_for_any_number_of_replicas(
    shards: list[list[list[int]]],
    budget: int | None,
    seed: int,
    replicas: int,
    micro_batches: int,
    max_rows: int,
    has_sections: bool,
) -> None:
    everything = [row for shard in shards for row in shard]
    if replicas * micro_batches > len(everything):
        return
    with small_sections(has_sections), batches(shards, budget, seed, max_rows) as data:
        shares = [data.share(index, replicas, micro_batches) for index in range(replicas)]
        seen: dict[int, list[int]] = {}
        position = Position(3)
        while position.epoch == 3:
            whole, parts = by_label(data.read(position)), [share.read(position) for share in shares]
            together: dict[int, list[int]] = {}
            lanes: list[int] = []
            for part in parts:
                assert part.num_rows >= micro_batches, "every rank can make as many micro-batches as the others"
                assert part.fresh.all() and part.lengths.tolist() == sorted(part.lengths.tolist(), reverse=True)
                together |= by_label(part)
                lanes += part.lanes.tolist()
            assert together == whole, "the global batch doesn't depend on which replica holds its rows"
            assert len(set(lanes)) == len(lanes), "every row has its own lane number, for its randomness"
            assert len(whole) <= max_rows
            assert not seen.keys() & whole.keys()
            seen |= whole
            assert all(share.next_position(position) == data.next_position(position) for share in shares)
            position = data.next_position(position)
        assert [seen[label] for label in range(len(everything))] == everything


@dataclass(frozen=True)
class EveryThird(LabeledItems):
    """A user's rows: the first, fourth, seventh ... sequence of each shard."""

    @property
    def shard_sizes(self) -> list[int]:
        return [-(-size // 3) for size in self.sequences.shard_sizes]

    def lengths(self, shard: int, start: int, stop: int) -> IntArray:
        return super().lengths(shard, 0, self.sequences.shard_sizes[shard])[::3][start:stop]

    def step_ranges(self, rows: Sequence[RowId]) -> list[StepRange]:
        return super().step_ranges([(shard, 3 * index) for shard, index in rows])


def test_rows_that_are_not_whole_sequences_come_once_per_epoch(tmp_path: Path) -> None:
    lengths = [[1 + (7 * row + shard) % 40 for row in range(50)] for shard in range(2)]
    shards = [[[row % 10] * length for row, length in enumerate(shard)] for shard in lengths]
    steps = [list(range(sum(shard))) for shard in lengths]
    sequences = write_tokens(tmp_path / "store", shards, 10, steps, per_step=True)
    with small_sections():
        data = Batches(EveryThird(sequences), 200)
        seen, position = [], Position()
        while not position.epoch:
            seen += data.order.batch(position).row_ids()
            position = data.next_position(position)
        expected = [(shard, row) for shard, size in enumerate(data.items.shard_sizes) for row in range(size)]
        assert sorted(seen) == expected
        assert Batches(LabeledItems(sequences), 200).order.pools.num_sections > 1, "whole sequences have sections"


@given(
    shards=shards, seed=st.integers(0, 99), start=st.integers(0, 12), before=st.integers(1, 4), after=st.integers(1, 4),
    has_sections=st.booleans(),
)  # fmt: skip
@EXAMPLES
def test_a_position_resumes_exactly_with_another_number_of_replicas(
    shards: list[list[list[int]]], seed: int, start: int, before: int, after: int, has_sections: bool
) -> None:
    if max(before, after) > sum(map(len, shards)):
        return
    with small_sections(has_sections), batches(shards, 40, seed) as data:
        walked = [
            [window for window, _ in islice(read_ahead(data.share(index, before), Position()), start + 4)]
            for index in range(before)
        ]
        saved = Position()
        for _ in range(start):
            saved = data.share(0, before).next_position(saved)
        resumed = [
            [window for window, _ in islice(read_ahead(data.share(index, after), saved), 4)] for index in range(after)
        ]
        for step in range(4):
            expected: dict[int, list[int]] = {}
            actual: dict[int, list[int]] = {}
            for share in walked:
                expected |= by_label(share[start + step])
            for share in resumed:
                actual |= by_label(share[step])
            assert actual == expected


def test_a_global_batch_is_the_same_for_1_2_3_8_and_4096_replicas() -> None:
    shards = [[[(a + b) % 10] * (1 + (a * 7 + b) % 23) for a in range(2000)] for b in range(3)]
    with small_sections(), batches(shards, 12_288, 1, 12_288) as data:
        assert data.order.pools.num_sections == 512
        positions = [Position()]
        while not positions[-1].epoch:
            positions.append(data.next_position(positions[-1]))
        assert len(positions) > 3
        for position in (positions[-2], Position(5)):
            whole = data.read(position, inputs=False, targets=False)
            rows = dict(zip(whole.lanes.tolist(), whole.lengths.tolist(), strict=True))
            assert min(rows.values()) > 0, "there are no blank rows"
            for count in (2, 3, 8, 4096):
                together: dict[int, int] = {}
                # Of 4,096 replicas, those of three nodes.
                for index in range(count) if count < 9 else [*range(8), *range(2048, 2056), *range(4088, 4096)]:
                    part = data.share(index, count).read(position, inputs=False, targets=False)
                    valid = part.lengths > 0
                    assert not together.keys() & set(part.lanes[valid].tolist())
                    together |= dict(zip(part.lanes[valid].tolist(), part.lengths[valid].tolist(), strict=True))
                if count < 9:
                    assert together == rows
                else:
                    own = {lane: length for lane, length in rows.items() if lane >> 32 in (0, 256, 511)}
                    assert own and together == own, "a node of eight replicas has the rows of one section"


def test_a_share_reads_and_plans_only_its_own_sections() -> None:
    shards = [[[(a + b) % 10] * (1 + (a * 7 + b) % 23) for a in range(2000)] for b in range(3)]
    with small_sections(), batches(shards, 12_288, 1, 12_288) as data:
        share = data.share(3, 64)
        assert share.order.sections == range(24, 32)
        read: set[tuple[int, int]] = set()
        position = Position()
        while not position.epoch:
            read |= set(share.order.batch(position).row_ids())
            position = share.next_position(position)
        assert len(read) == pytest.approx(6_000 / 64, rel=0.3)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60), per_row=st.integers(-1, 9), at_once=st.integers(1, 9)
)
@EXAMPLES
def test_the_sequence_that_starts_at_a_unit_is_found(lengths: list[int], per_row: int, at_once: int) -> None:
    starts = np.cumsum([0, *lengths[:-1]]) + per_row * np.arange(len(lengths))
    with (
        batches([[[1] * length for length in lengths]], 50, 1) as data,
        patch.object(sequences_module, "_SEARCHED_AT_ONCE", at_once),
    ):
        assert isinstance(data.items, LabeledItems)
        stored: Sequences = data.items.sequences
        for unit in range(-1, sum(lengths) + per_row * len(lengths) + 2):
            assert stored.first_starting_at(0, unit, per_row) == np.searchsorted(starts, unit)
        assert StepUnits(SequenceRows(stored), per_row).shard_units == [sum(lengths) + per_row * len(lengths)]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_read_the_same_windows(workers: int) -> None:
    shards = [[[(7 * a + b) % 10 for b in range(1 + (a * 5) % 23)] for a in range(40)] for _ in range(3)]
    with batches(shards, 100, 1) as data:
        alone = list(islice(read_ahead(data, Position(0, 0, 2)), 30))
        shared = list(islice(read_ahead(data, Position(0, 0, 2), workers=workers), 30))
        for (one, after_one), (two, after_two) in zip(alone, shared, strict=True):
            assert after_one == after_two
            assert by_label(one) == by_label(two) and torch.equal(one.lanes, two.lanes)


@given(shards=shards, seed=st.integers(0, 9))
@EXAMPLES
def test_lengths_are_known_without_inputs_and_targets(shards: list[list[list[int]]], seed: int) -> None:
    with batches(shards, 50, seed) as data:
        whole, bare = data.read(Position()), data.read(Position(), inputs=False, targets=False)
        assert bare.inputs is None and bare.targets is None
        assert torch.equal(bare.lengths, whole.lengths) and bare.num_steps == whole.num_steps


def test_the_targets_of_next_token_items_are_the_next_tokens() -> None:
    with batches([[[1, 2, 3], [4, 5], [6]]], 50, 1, is_labeled=False) as data:
        window = data.read(Position())
        assert window.inputs is not None and window.targets is not None
        assert window.lengths.tolist() == [2, 1, 0]
        assert window.inputs.tolist() == [[1, 4, 0], [2, 0, 0]]
        assert window.targets.tolist() == [[2, 5, -100], [3, -100, -100]]


def test_a_replica_without_rows_gets_blank_ones() -> None:
    shards = [[[3] * 20, [4] * 20, [5] * 20, [6] * 20]]
    with batches(shards, 20, 1) as data:
        windows = [data.share(index, 2, 2).read(Position()) for index in range(2)]
        assert [window.num_rows for window in windows] == [2, 2]
        blank = windows[1]
        assert blank.inputs is not None and blank.targets is not None
        assert blank.lengths.tolist() == [0, 0] and (blank.targets == -100).all() and (blank.inputs == 0).all()


def test_a_row_longer_than_the_budget_is_refused_with_its_shard_and_index() -> None:
    with (
        pytest.raises(DataError, match=r"sequence 1 of shard 1 has 30 time steps, more than data.budget=20; raise the"),
        batches([[[1] * 5, [2] * 4], [[3], [1] * 30]], 20, 1),
    ):
        pass


def test_a_share_that_does_not_exist_is_refused() -> None:
    with (
        batches([[[1], [2], [3]]], 20, 1) as data,
        pytest.raises(DataError, match="share index=2 of count=2 does not exist"),
    ):
        data.share(2, 2)


def test_batches_are_pickled_without_their_cached_plans() -> None:
    with batches([[[1, 2]] * 500], 20, 1) as data:
        fresh = len(pickle.dumps(data))
        data.read(Position())
        again = pickle.loads(pickle.dumps(data))  # noqa: S301 - our own
        assert len(pickle.dumps(data)) < fresh + 900
        assert by_label(again.read(Position())) == by_label(data.read(Position()))


def test_batches_say_which_limits_they_have() -> None:
    items = from_arrays(np.zeros((5, 4, 1)), np.zeros(5))
    assert str(Batches(items, budget=100, max_rows=3)) == "5 rows in batches of at most 100 time steps and 3 rows"
    assert repr(Batches(items, max_rows=3)) == "<Batches: 5 rows in batches of at most 3 rows>"
    assert str(Batches(items, budget=100, max_rows=65536)) == "5 rows in batches of at most 100 time steps"
