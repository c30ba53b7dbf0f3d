"""from_dataset: the items of a torch Dataset are the rows that from_arrays makes of the same arrays."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset

from stretto.data import ArrayItems, Batches, DatasetItems, Position, from_arrays, from_dataset
from stretto.errors import DataError

DRAW = np.random.default_rng(2)
LENGTHS = [3, 5, 1, 4, 5, 2, 2, 6, 3, 1]
INPUTS = [DRAW.normal(size=(length, 2)) for length in LENGTHS]
TOKENS = [DRAW.integers(1, 9, size=length + 1) for length in LENGTHS]
LABELS = [int(label) for label in DRAW.integers(3, size=10)]
TAGS = [DRAW.integers(4, size=length) for length in LENGTHS]
VALUES = [DRAW.normal(size=2) for _ in LENGTHS]


class ListDataset(Dataset[Any]):
    """Counts how often an item is read."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.num_reads = 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        self.num_reads += 1
        item = self.items[index]
        if isinstance(item, Exception):
            raise item
        return item


def pairs(inputs: list[Any], targets: list[Any]) -> ListDataset:
    return ListDataset([(torch.from_numpy(x), target) for x, target in zip(inputs, targets, strict=True)])


def assert_same_batches(actual: DatasetItems, expected: ArrayItems) -> None:
    assert actual.task == expected.task and actual.labels == expected.labels
    ours, theirs = Batches(actual, budget=12, seed=3), Batches(expected, budget=12, seed=3)
    position = Position()
    while position.epoch == 0:
        for share in (0, 1):
            a, b = ours.share(share, 2).read(position), theirs.share(share, 2).read(position)
            assert a.inputs is not None and b.inputs is not None and a.targets is not None and b.targets is not None
            torch.testing.assert_close(a.inputs, b.inputs, rtol=0, atol=0)
            torch.testing.assert_close(a.targets, b.targets, rtol=0, atol=0, equal_nan=True)
            assert a.lengths.tolist() == b.lengths.tolist()
        assert ours.next_position(position) == theirs.next_position(position)
        position = ours.next_position(position)


def test_items_are_the_rows_of_the_same_arrays() -> None:
    assert_same_batches(from_dataset(pairs(INPUTS, LABELS)), from_arrays(INPUTS, LABELS))
    assert_same_batches(from_dataset(pairs(INPUTS, TAGS)), from_arrays(INPUTS, TAGS))
    kind: Any = "values_per_row"
    assert_same_batches(
        from_dataset(pairs(INPUTS, VALUES), target_kind=kind), from_arrays(INPUTS, VALUES, target_kind=kind)
    )
    names = ["abc"[label] for label in LABELS]
    assert_same_batches(from_dataset(pairs(INPUTS, names)), from_arrays(INPUTS, names))
    assert_same_batches(from_dataset(ListDataset(list(map(torch.from_numpy, TOKENS)))), from_arrays(TOKENS))
    dicts = ListDataset([{"inputs": x, "targets": y} for x, y in zip(TOKENS, LABELS, strict=True)])
    assert_same_batches(from_dataset(dicts), from_arrays(TOKENS, LABELS))


def test_a_collate_function_of_a_data_loader_can_be_used() -> None:
    items = [{"signal": torch.from_numpy(x), "label": label} for x, label in zip(INPUTS, LABELS, strict=True)]

    def collate(batch: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        lengths = torch.tensor([len(item["signal"]) for item in batch])
        padded = pad_sequence([item["signal"] for item in batch], batch_first=True, padding_value=torch.nan)
        return padded, torch.tensor([item["label"] for item in batch]), lengths

    assert_same_batches(from_dataset(ListDataset(items), collate=collate), from_arrays(INPUTS, LABELS))


def test_with_lengths_only_the_first_items_are_read_in_advance() -> None:
    dataset = pairs(INPUTS, LABELS)
    items = from_dataset(dataset, lengths=LENGTHS, classes=3)
    assert dataset.num_reads == 8
    assert_same_batches(items, from_arrays(INPUTS, LABELS))


def test_lengths_are_found_once_with_progress_and_cached(tmp_path: Path) -> None:
    dataset = pairs(INPUTS, LABELS)
    progress: list[float] = []
    cache = tmp_path / "new" / "lengths.npz"
    first = from_dataset(dataset, cache=cache, on_item=progress.append)
    assert progress == pytest.approx([(index + 1) / 10 for index in range(10)])
    num_reads = dataset.num_reads
    again = from_dataset(dataset, cache=cache)
    assert dataset.num_reads == num_reads + 8 and again.task == first.task and again.digest == first.digest
    with pytest.raises(DataError, match="has 10 items, but the dataset has 3; delete it"):
        from_dataset(pairs(INPUTS[:3], LABELS[:3]), cache=cache)
    cache.write_bytes(b"no")
    with pytest.raises(DataError, match=r"lengths.* can't be read"):
        from_dataset(dataset, cache=cache)


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def wrong_collate(items: list[Any]) -> Any:  # noqa: ANN401
    return 3


def test_mistakes_are_one_sentence() -> None:
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: from_dataset(_Stream()), "dataset is a _Stream; use a Dataset with __len__ and __getitem__"),
        (lambda: from_dataset(ListDataset([])), "the dataset has no items"),
        (lambda: from_dataset(pairs(INPUTS, LABELS), lengths=LENGTHS), "classes is missing, and lengths are given"),
        (lambda: from_dataset(ListDataset(TOKENS), lengths=LENGTHS), "num_tokens is missing, and lengths are given"),
        (lambda: from_dataset(ListDataset([KeyError("x")])), "item 0 of the dataset can't be read .KeyError: 'x'."),
        (lambda: from_dataset(ListDataset([{"x": 1}])), "has the keys x; use inputs and targets, or pass collate"),
        (lambda: from_dataset(ListDataset([(1, 2, 3)])), "item 0 of the dataset has 3 parts"),
        (lambda: from_dataset(ListDataset(INPUTS)), "have no targets, and inputs are not tokens"),
        (lambda: from_dataset(pairs(INPUTS, LABELS), classes=2), "classes=2, but 2 occurs in the dataset"),
        (lambda: from_dataset(pairs(INPUTS, LABELS), collate=wrong_collate), "collate returned an object of type int"),
    ]
    for make, message in cases:
        with pytest.raises(DataError, match=message):
            make()


def test_an_item_that_changes_is_noticed() -> None:
    dataset = pairs(list(INPUTS), LABELS)
    items = from_dataset(dataset)
    dataset.items[7] = (torch.zeros(1, 2), 0)
    with pytest.raises(DataError, match="item 7 of the dataset has 1 time steps, not 6 as before or in lengths"):
        Batches(items, max_rows=10).read(Position())
