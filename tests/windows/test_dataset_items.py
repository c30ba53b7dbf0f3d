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


def time_first(items: list[Any]) -> Any:  # noqa: ANN401
    return pad_sequence([torch.as_tensor(x) for x, _ in items]), torch.tensor([y for _, y in items])


def lengths_second(items: list[Any]) -> Any:  # noqa: ANN401
    padded = pad_sequence([torch.as_tensor(x) for x, _ in items], batch_first=True)
    return padded, torch.tensor([len(x) for x, _ in items]), torch.tensor([y for _, y in items])


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
        (lambda: from_dataset(pairs(INPUTS, LABELS), collate=time_first), r"inputs of shape \[\d+, 1, 2\] for 1 item;"),
        (lambda: from_dataset(pairs(INPUTS, LABELS), collate=lengths_second), "collate returns is the length of each"),
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


def test_integers_with_named_classes_keep_the_order_of_the_names() -> None:
    names = ["zero", "one", "two"]
    expected = from_arrays(INPUTS, LABELS, classes=names)
    assert expected.labels == tuple(names)
    assert_same_batches(from_dataset(pairs(INPUTS, LABELS), classes=names), expected)
    assert_same_batches(from_dataset(pairs(INPUTS, LABELS), classes=names, lengths=LENGTHS), expected)
    window = Batches(expected, max_rows=10).read(Position())
    assert window.targets is not None and set(window.targets.flatten().tolist()) == {-100, 0, 1, 2}


def test_an_item_that_breaks_what_was_given_is_named_when_it_is_read() -> None:
    text = ["abc"[label] for label in LABELS]
    nan = [*INPUTS[:8], INPUTS[8] * np.nan, INPUTS[9]]
    tags = [*TAGS[:8], TAGS[8][1:], TAGS[9]]
    many, negative = [*TOKENS[:8], TOKENS[8] + 90, TOKENS[9]], [*TOKENS[:8], TOKENS[8] * 0 - 100, TOKENS[9]]
    steps = [length + 1 for length in LENGTHS]
    cases: list[tuple[ListDataset, dict[str, Any], str]] = [
        (pairs(INPUTS, [*LABELS[:8], 7, 0]), {"classes": 3}, "targets has 7 in row 8, but .* only 3 classes"),
        (pairs(INPUTS, [*text[:8], "bb", "a"]), {"classes": list("abc")}, "the class 'bb' in row 8, which is"),
        (pairs(INPUTS, [*LABELS[:8], "x", 0]), {"classes": 3}, "targets has .*'x'.* in row 8; use integers"),
        (pairs(nan, LABELS), {"classes": 3}, "item 8 of the dataset has an input that is NaN"),
        (pairs(INPUTS, tags), {"classes": 4}, "item 8 of the dataset has 3 time steps, but 2 targets"),
        (ListDataset(many), {"num_tokens": 9, "lengths": steps}, "row 8, but there are only 9 tokens"),
        (ListDataset(negative), {"num_tokens": 9, "lengths": steps}, "-100 in row 8; .* pass lengths"),
    ]
    for dataset, options, message in cases:
        items = from_dataset(dataset, **{"lengths": LENGTHS, **options})
        with pytest.raises(DataError, match=message):
            Batches(items, max_rows=10).read(Position())
    with pytest.raises(DataError, match="classes=3 is a number, but targets are text"):
        from_dataset(pairs(INPUTS, text), classes=3, lengths=LENGTHS)


def test_a_missing_class_in_text_or_numbers_is_ignored() -> None:
    columns: list[Any] = [["a", None, "b", "a", "b", "a", "b", "a", None, "a"], [0, None, 1, 0, 1, 0, 1, 0, None, 0]]
    for labels in columns:
        items = from_dataset(pairs(INPUTS, labels))
        assert items.task.num_outputs == 2 and items.labels == (("a", "b") if "a" in labels else ())
        assert_same_batches(items, from_arrays(INPUTS, labels))
        window = Batches(items, max_rows=10).read(Position())
        assert window.targets is not None and (window.targets >= 0).sum() == 8


def test_a_cache_of_other_items_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    cache = tmp_path / "lengths.npz"
    items = from_dataset(pairs(INPUTS, LABELS), cache=cache)
    longer = [np.concatenate([x, x]) for x in INPUTS]
    others = [pairs(longer, LABELS), pairs(INPUTS, [label * 2 for label in LABELS])]
    for dataset in others:
        with pytest.raises(DataError, match="was made from other items or targets; delete it"):
            from_dataset(dataset, cache=cache)
    assert len({items.digest, *(from_dataset(dataset).digest for dataset in others)}) == 3
    for content in (b"", cache.read_bytes()[:90]):
        cache.write_bytes(content)
        with pytest.raises(DataError, match=r"lengths.* can't be read"):
            from_dataset(others[0], cache=cache)


def test_an_item_that_grows_or_has_no_targets_is_noticed() -> None:
    dataset = pairs(list(INPUTS), LABELS)
    items = from_dataset(dataset)
    dataset.items[7] = (torch.zeros(9, 2), 0)
    with pytest.raises(DataError, match="item 7 of the dataset has 9 time steps, not 6 as before or in lengths"):
        Batches(items, max_rows=10).read(Position())
    for index, lengths in ((8, None), (8, LENGTHS), (0, LENGTHS)):  # item 0 is read in advance, item 8 in a batch
        dataset = pairs(INPUTS, LABELS)
        dataset.items[index] = {"inputs": INPUTS[index]}
        with pytest.raises(DataError, match=f"item {index} of the dataset has no targets, but others have"):
            Batches(from_dataset(dataset, lengths=lengths, classes=3), max_rows=10).read(Position())


def test_padding_beyond_the_given_lengths_may_be_anything() -> None:
    padded = [np.concatenate([x, np.full((7 - len(x), 2), np.nan)]) for x in INPUTS]
    items = from_dataset(pairs(padded, LABELS), lengths=LENGTHS, classes=3)
    assert_same_batches(items, from_arrays(INPUTS, LABELS))
