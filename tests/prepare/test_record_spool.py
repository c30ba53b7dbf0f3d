"""Rows in memory and records that come one by one are written to stores."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from stretto.data import (
    Items,
    LabeledItems,
    NextTokenItems,
    SequenceOptions,
    SeriesOptions,
    from_arrays,
    from_dataset,
    from_table,
    prepare_sequences,
    prepare_series,
)
from stretto.errors import DataError

DRAW = np.random.default_rng(1)
X = DRAW.normal(size=(9, 4, 2)).astype(np.float32)
LENGTHS = DRAW.integers(1, 5, 9)


class Pairs(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[NDArray[Any], str]:
        return X[index, : LENGTHS[index]], "ab"[index % 2]


def table_items() -> Items:
    import pandas  # type: ignore[import-untyped]

    frame = pandas.DataFrame({"id": np.arange(12) // 4, "a": np.arange(12.0), "b": np.arange(12.0) % 5})
    return from_table(frame, ["a"], ["b"], by="id", horizon=2)


def with_missing(values: NDArray[Any]) -> NDArray[Any]:
    values = values.astype(np.float32)
    values[::2, 0] = np.nan
    return values


ROWS = {
    "class per row": lambda: from_arrays(X, np.arange(9) % 3, lengths=LENGTHS),
    "values per row": lambda: from_arrays(X, with_missing(X.sum(1)), lengths=LENGTHS),
    "class per step": lambda: from_arrays(X, np.where(X[..., 0] > 0, "up", "down"), lengths=LENGTHS),
    "values per step": lambda: from_arrays(X, with_missing(X.cumsum(1)), lengths=LENGTHS),
    "tokens": lambda: from_arrays([np.arange(2 + row) % 5 for row in range(6)], num_tokens=7),
    "dataset": lambda: from_dataset(Pairs()),
    "table with a horizon": table_items,
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_in_memory_are_the_same_in_a_store(name: str, tmp_path: Path) -> None:
    items: Items = ROWS[name]()
    (sequences,) = prepare_sequences(items, tmp_path / "out")
    is_language = items.task.targets == "next_token"
    stored: Items = NextTokenItems(sequences) if is_language else LabeledItems(sequences, scale=False)
    kind = "values_per_step" if items.task.targets == "horizon" else items.task.targets
    assert (stored.task.num_inputs, stored.task.num_outputs) == (items.task.num_inputs, items.task.num_outputs)
    assert stored.task.targets == kind
    rows = [(0, row) for row in range(items.shard_sizes[0])]
    payloads = [source.read(rows, items.longest, inputs=True, targets=True) for source in (items, stored)]
    for one, two in zip(*payloads, strict=True):
        assert one is not None and two is not None
        assert torch.equal(one.nan_to_num(-1).to(two.dtype), two.nan_to_num(-1))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # the temporary file is gone


def records() -> Iterator[dict[str, Any]]:
    for row in range(8):
        yield {"values": X[row], "y": torch.tensor([1.5, row]), "name": "n"}


def test_an_iterator_of_records_is_read_once(tmp_path: Path) -> None:
    train, valid = prepare_sequences(
        records(), tmp_path / "out", SequenceOptions(targets="y", validation_fraction=0.4, seed=3)
    )
    assert train.num_sequences + valid.num_sequences == 8 and train.fields.targets == valid.fields.targets
    values = [row.tolist() for store in (train, valid) for row in store.read(store.step_ranges([(0, 0), (0, 1)]))]
    assert all(value in X.tolist() for value in values)


def test_rows_of_a_series_come_one_by_one_too(tmp_path: Path) -> None:
    rows = ({"day": day, "load": day * 0.5} for day in range(5))
    (series,) = prepare_series(rows, tmp_path / "out", SeriesOptions(time="day"))
    assert series.read(series.step_ranges([(0, 0)]))[0].ravel().tolist() == [0, 0.5, 1, 1.5, 2]


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ([[1, 2]], SequenceOptions(), "record 0 is an object of type list; use a dict"),
        ([{"values": {1, 2}}], SequenceOptions(), "record 0 can't be written as JSON"),
        (iter(()), SequenceOptions(), "there are no records to prepare"),
        (ROWS["tokens"](), SequenceOptions(label="y"), "label=y has no effect on rows, whose fields are known"),
    ],
)
def test_a_mistake_is_one_sentence(source: Items, options: SequenceOptions, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        prepare_sequences(source, tmp_path / "out", options)
    assert not list(tmp_path.iterdir())
