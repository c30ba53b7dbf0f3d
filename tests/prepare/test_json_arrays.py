"""Arrays in the file of spooled records: read back as the lists of `tolist`, and much shorter than their text."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from stretto.data import SequenceOptions, from_arrays, prepare_sequences
from stretto.errors import DataError
from stretto.prepare.json_arrays import decode_array, encode_array
from stretto.prepare.record_spool import spool_records

ARRAYS: list[NDArray[Any]] = [
    np.array([[1.5, np.nan], [np.inf, -0.0]], np.float32),
    np.arange(12, dtype=np.float64).reshape(3, 4).T / 7,
    np.array([2**62, -1]),
    np.array([True, False]),
    np.array([0.1], np.float16),
    np.array([1, 2], ">i4"),
    np.zeros((0, 3)),
    np.array(3.5, np.float32),
    np.array(["a", "bc"]),
]


@pytest.mark.parametrize("array", ARRAYS, ids=str)
def test_an_array_is_read_back_as_its_list(array: NDArray[Any]) -> None:
    text = json.dumps({"x": [{"y": encode_array(array)}], "z": {}})
    actual = json.loads(text, object_hook=decode_array)
    assert repr(actual) == repr({"x": [{"y": array.tolist()}], "z": {}})  # not `==`: NaN differs from itself


def test_spooled_records_have_no_text_of_numbers(tmp_path: Path) -> None:
    rows = [np.random.default_rng(1).normal(size=(20, 30)).astype(np.float32)] * 4
    items = from_arrays(rows, [0, 1, 0, 1])
    with spool_records(items, tmp_path / "data") as path:
        assert path.stat().st_size < 4 * 600 * 6, "a number has 4 bytes; its text would have about 19"


def test_arrays_of_records_are_prepared_as_their_lists_in_a_file_are(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    records: list[dict[str, Any]] = [
        {"values": draw.normal(size=(size, 3)), "y": torch.tensor(draw.integers(0, 4, size))} for size in (5, 2, 9)
    ]
    lines = [{"values": record["values"].tolist(), "y": record["y"].tolist()} for record in records]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = SequenceOptions(targets=("y",), target_kind="class_per_step")
    (from_file,) = prepare_sequences(tmp_path / "rows.jsonl", tmp_path / "file", options, workers=1)
    (from_memory,) = prepare_sequences(iter(records), tmp_path / "memory", options, workers=1)
    assert from_memory.fields.values == from_file.fields.values
    for name in ("values", "targets", "ends"):
        paths = sorted((tmp_path / "file").glob(f"*{name}*"))
        assert paths
        for path in paths:
            assert path.read_bytes() == (tmp_path / "memory" / path.name).read_bytes()


def test_an_object_in_a_users_file_is_not_an_array(tmp_path: Path) -> None:
    record = {"values": [1.0, 2.0], "note": encode_array(np.ones(2))}
    (tmp_path / "rows.jsonl").write_text(json.dumps(record) + "\n")
    options = SequenceOptions(sequence="note")
    with pytest.raises(DataError, match=r"'note' is .*, not a list"):
        prepare_sequences(tmp_path / "rows.jsonl", tmp_path / "data", options, workers=1)
