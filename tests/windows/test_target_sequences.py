"""Targets with a length of their own in memory: what they may be, and how they are batched and shared."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from stretto.data import (
    ArrayItems,
    Batches,
    LabeledItems,
    Position,
    SequenceOptions,
    Sequences,
    from_arrays,
    prepare_sequences,
)
from stretto.errors import DataError

INPUTS = [np.zeros((length, 2), np.float32) for length in (5, 3, 4, 2)]
NONE = -100


def make(targets: object, **options: object) -> ArrayItems:
    return from_arrays(INPUTS, targets, target_kind="sequence_per_row", **options)  # type: ignore[arg-type]


def read(items: ArrayItems) -> list[list[int]]:
    _, targets = items.read([(0, index) for index in range(4)], 5, inputs=False, targets=True)
    assert targets is not None
    return targets.t().tolist()


@pytest.mark.parametrize(
    "targets",
    [
        ["abc", "b", "", "ca"],
        [["a", "b", "c"], ["b"], [], ["c", "a"]],
        [[1, 2, 3], [2], [], [3, 1]],
        [np.array([1, 2, 3]), np.array([2]), np.array([], int), np.array([3, 1])],
        np.array([[1, 2, 3], [2, NONE, NONE], [NONE] * 3, [3, 1, NONE]]),
        ["abc", "b", None, "ca"],
    ],
    ids=["text", "names", "integers", "arrays", "padded", "missing"],
)
def test_symbols_count_from_one_and_are_padded_to_the_longest(targets: object) -> None:
    items = make(targets)
    assert read(items) == [[1, 2, 3], [2, NONE, NONE], [NONE] * 3, [3, 1, NONE]]
    assert items.task.targets == "sequence_per_row" and items.task.num_outputs == 4, "the blank is class 0"
    assert not items.labels or items.labels == ("", "a", "b", "c")


def test_classes_of_other_data_keep_their_numbers() -> None:
    items = make(["ab", "d", "", ""], classes=["", "a", "b", "c", "d"])
    assert read(items)[:2] == [[1, 2], [4, NONE]] and items.task.num_outputs == 5
    assert read(make(["ab", "d", "", ""], classes="dcba"))[:2] == [[1, 2], [4, NONE]]
    assert make([[1], [2], [], []], classes=9).task.num_outputs == 9
    assert read(make([[1, 2], [3], [], []], classes=["", "a", "b", "c"]))[:2] == [[1, 2], [3, NONE]]


@pytest.mark.parametrize(
    ("make_items", "message"),
    [
        (lambda: make([[0, 1], [1], [], []]), r"targets\[0\] has the class 0, which is the blank of CTC and never"),
        (lambda: make([[1, -1], [1], [], []]), "targets has -1 in row 0; count classes from 0"),
        (lambda: make(["ab", "x", "", ""], classes="ab"), r"the class 'x' in row 1, which is not one of"),
        (
            lambda: make([[1, 2, 3], [2], [], []], classes=["a", "b", "c"]),
            r"targets\[0\] has 3, but classes name only 0 to 2, of which 0 is the blank .* classes=\['', 'a', 'b'\]",
        ),
        (lambda: make([1, 2, 3, 4]), "targets are single numbers, but sequence_per_row needs a sequence"),
        (lambda: make(["", "", "", ""]), "targets have no symbol in any row"),
        (lambda: make(["a", "b", "c"]), "targets have 3 rows, but inputs have 4"),
        (lambda: make(["a", "b", "c", "d"]).cut(2), "targets of kind sequence_per_row can't be cut"),
    ],
)
def test_wrong_targets_are_refused_in_one_sentence(make_items: Callable[[], object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_items()


def test_shares_of_a_batch_have_the_targets_of_their_rows_and_blank_rows_have_none() -> None:
    windows = Batches(make(["abc", "b", "", "ca"]), max_rows=4)
    whole = windows.read(Position())
    assert whole.targets is not None and whole.targets.shape == (3, 4) and whole.num_steps == 5
    expected = {int(lane): whole.targets[:, row].tolist() for row, lane in enumerate(whole.lanes)}
    for index in range(3):
        share = windows.share(index, 3, min_rows=2).read(Position())
        assert share.targets is not None and share.targets.shape[1] == share.num_rows == 2
        for row, lane in enumerate(share.lanes.tolist()):
            symbols = [symbol for symbol in share.targets[:, row].tolist() if symbol != NONE]
            assert symbols == [symbol for symbol in expected.get(lane, []) if symbol != NONE]
    pinned = whole.select(torch.tensor([3, 0]))
    assert pinned.targets is not None and pinned.targets.shape == (3, 2)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["abc", "b", "", "ca"], [[1, 2, 3], [2], [], [3, 1]]),
        # In a store, symbols are numbered in the order of their names.
        ([[1, 5, 3], [5], [], [3, 1]], [[1, 3, 2], [3], [], [2, 1]]),
    ],
    ids=["text", "integers"],
)
def test_rows_in_memory_become_a_store_with_the_same_targets(
    targets: object, expected: list[list[int]], tmp_path: Path
) -> None:
    (store,) = prepare_sequences(make(targets), tmp_path / "store", SequenceOptions())
    stored = LabeledItems(Sequences.open(store.location))
    assert stored.task.targets == "sequence_per_row" and stored.task.num_outputs == 4
    _, read_targets = stored.read([(0, index) for index in range(4)], 5, inputs=False, targets=True)
    assert read_targets is not None
    assert [[symbol for symbol in row if symbol != NONE] for row in read_targets.t().tolist()] == expected
