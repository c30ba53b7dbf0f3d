"""Rows of arrays, from .npz and .npy files."""

import tracemalloc
import zipfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.data import SequenceOptions, prepare_sequences
from stretto.errors import DataError
from stretto.prepare.npz_file import ArrayFile


def save(path: Path, *, is_compressed: bool = True, **arrays: object) -> Path:
    (np.savez_compressed if is_compressed else np.savez)(path, **cast(dict[str, Any], arrays))
    return path


@pytest.mark.parametrize("is_compressed", [True, False])
@given(num_rows=st.integers(1, 40), start=st.integers(0, 39), row_bytes=st.integers(1, 5))
@settings(max_examples=15, deadline=None)
def test_the_records_are_the_rows_of_the_arrays(
    is_compressed: bool, num_rows: int, start: int, row_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    draw = np.random.default_rng(num_rows)
    x, y = draw.normal(size=(num_rows, row_bytes, 2)).astype(np.float32), draw.integers(9, size=num_rows)
    path = tmp_path_factory.mktemp("arrays") / "a.npz"
    save(path, is_compressed=is_compressed, X=x, y=y, name=np.array([f"ä{row}" for row in range(num_rows)]))
    records = list(ArrayFile.open(path).read(start=start))
    rows = range(start, num_rows)
    assert [record["inputs"] for record in records] == x[start:].tolist()
    assert [record["targets"] for record in records] == y[start:].tolist()
    assert [record["name"] for record in records] == [f"ä{row}" for row in rows]


def test_lengths_cut_the_inputs_and_what_is_per_time_step(tmp_path: Path) -> None:
    inputs, tags, vector = np.arange(12).reshape(3, 4), np.arange(12).reshape(3, 4) % 2, np.zeros((3, 2))
    path = save(tmp_path / "a.npz", inputs=inputs, targets=tags, vector=vector, lengths=np.array([4, 1, 2]))
    records = list(ArrayFile.open(path).read())
    assert [record["inputs"] for record in records] == [[0, 1, 2, 3], [4], [8, 9]]
    assert [record["targets"] for record in records] == [[0, 1, 0, 1], [0], [0, 1]]
    assert all(record["vector"] == [0.0, 0.0] and "lengths" not in record for record in records)


def test_lengths_do_not_cut_targets_that_are_declared_per_row(tmp_path: Path) -> None:
    x, y = np.ones((3, 4, 2), np.float32), np.arange(12.0).reshape(3, 4)
    path = save(tmp_path / "a.npz", X=x, y=y, lengths=np.array([4, 1, 2]))
    options = SequenceOptions(targets="targets", target_kind="values_per_row")
    (store,) = prepare_sequences(path, tmp_path / "out", options)
    rows = [(0, row) for row in range(3)]
    assert [values.tolist() for values in store.read_row_targets(rows)] == y.tolist()
    assert [len(steps) for steps in store.read(store.step_ranges(rows))] == [4, 1, 2]


def test_an_npy_file_holds_the_inputs(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(6).reshape(3, 2))
    assert list(ArrayFile.open(tmp_path / "a.npy").read(start=1)) == [{"inputs": [2, 3]}, {"inputs": [4, 5]}]


def test_other_arrays_beside_the_inputs_are_left_out(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", x=np.zeros((3, 2)), mean=np.zeros(2), scale=np.float32(3))
    assert set(ArrayFile.open(path).arrays) == {"inputs"}


def test_times_and_flags_become_values_of_python(tmp_path: Path) -> None:
    times = np.array(["2025-01-01T12", "2025-01-02T12"], "datetime64[ns]")
    path = save(tmp_path / "a.npz", time=times, flags=np.ones((2, 3), bool), flag=np.array([True, False]))
    record = next(iter(ArrayFile.open(path).read()))
    assert record["time"].isoformat() == "2025-01-01T12:00:00"
    assert record["flags"] == [1, 1, 1] and record["flag"] is True


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ({"X": np.zeros((3, 2)), "y": np.zeros(2)}, "has 3 rows in 'X' and 2 in 'y'; make them equal"),
        ({"x_train": np.zeros((3, 2)), "x_test": np.zeros((2, 2))}, "3 rows in 'x_train' and 2 in 'x_test'"),
        ({"X": np.zeros((3, 2)), "inputs": np.zeros((3, 2))}, "'X' and 'inputs', and both could be the inputs; keep"),
        ({"X": np.array([[1], [2, 3]], object)}, "'X' holds Python objects, which are not read because they can run"),
        ({"X": np.zeros((3, 2), complex)}, "'X' has the dtype complex128; save numbers, text or times"),
        ({"X": np.zeros((2, 3)).T}, "'X' is in Fortran order, so its rows are scattered; save numpy.ascontiguous"),
        ({"X": np.zeros((3, 2, 2, 2))}, r"'X' has the shape \[3, 2, 2, 2\]; save \[rows, time\] or"),
        ({"X": np.zeros(3)}, r"'X' has the shape \[3\]; save \[rows, time\] or"),
        ({"X": np.zeros((3, 2)), "y": np.zeros((3, 2, 2, 2))}, r"'y' has the shape \[3, 2, 2, 2\]; save"),
        ({"X": np.zeros((0, 3))}, "has no rows; leave it out"),
        ({"X": np.zeros((3, 0))}, r"'X' has the shape \[3, 0\]; save rows that are not empty"),
        ({"X": np.float32(1)}, "'X' is a single value; save an array with one row per sequence"),
        ({}, "has no arrays; write it with numpy.savez"),
        ({"X": np.zeros((2, 3)), "lengths": np.array([3.0, 1.0])}, r"'lengths' has shape \[2\], float64; use integers"),
        ({"y": np.zeros(2), "lengths": np.array([3, 1])}, "has 'lengths', but no array 'inputs' of the shape"),
        ({"X": np.zeros((2, 3)), "lengths": np.array([3, 4])}, "row 2: 'lengths' is 4, but 'inputs' has 3 time steps"),
    ],
)
def test_arrays_that_are_not_rows_are_refused_in_one_sentence(
    arrays: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=problem):
        list(ArrayFile.open(tmp_path / "a.npz").read())


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06" + b"\0" * 18, b"\x93NUMPY\x01\0\x05\0", b"x" * 99])
@pytest.mark.parametrize("suffix", [".npz", ".npy"])
def test_a_file_that_is_not_of_arrays_is_refused(content: bytes, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"can't be read \(.*\); write it again|has no arrays"):
        ArrayFile.open(path)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': (",
        "'''",
        "{[]: 1}",
        "{'descr': ('<f4',), 'fortran_order': False, 'shape': (2, 3), }",
        "{'descr': [('a',)], 'fortran_order': False, 'shape': (2, 3), }",
        "(" * 5000,
        "\n  a\n b",
    ],
)
def test_a_damaged_header_is_refused_in_one_sentence(header: str, tmp_path: Path) -> None:
    length = len(header).to_bytes(2, "little")
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\0" + length + header.encode() + bytes(24))
    with pytest.raises(DataError, match=r"can't be read \(.*\); write it again"):
        ArrayFile.open(tmp_path / "a.npy")


def test_a_long_header_is_not_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("X.npy", b"\x93NUMPY\x02\0" + (16 << 20).to_bytes(4, "little") + bytes(16 << 20))
    tracemalloc.start()
    with pytest.raises(DataError, match=r"the header of X has 16,777,216 bytes, which is more than 10,000"):
        ArrayFile.open(tmp_path / "a.npz")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@given(cut=st.integers(0, 900), byte=st.integers(0, 255))
@settings(max_examples=60, deadline=None)
def test_a_damaged_file_is_a_data_error(cut: int, byte: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = save(tmp_path_factory.mktemp("arrays") / "a.npz", X=np.arange(60.0).reshape(10, 6), y=np.arange(10))
    content = bytearray(path.read_bytes())
    content[cut % len(content)] = byte
    path.write_bytes(content)
    try:
        list(ArrayFile.open(path).read())
    except DataError as error:
        assert str(path) in str(error)


def test_a_bomb_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", X=np.zeros((70, 1 << 17)))
    assert path.stat().st_size < 1 << 17
    with pytest.raises(DataError, match=r"expand to more than 67,108,864, which looks like a zip bomb; if you trust"):
        ArrayFile.open(path)


def test_a_size_that_the_archive_claims_is_not_believed(tmp_path: Path) -> None:
    """The header of the array says how many rows there are; more or fewer bytes are an error."""
    np.save(tmp_path / "X.npy", np.zeros((100, 100)))
    content = (tmp_path / "X.npy").read_bytes()
    for wrong in (content[:-8], content + bytes(8)):
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
            archive.writestr("X.npy", wrong)
        with pytest.raises(DataError, match="'X' is not complete; write the file again"):
            ArrayFile.open(tmp_path / "a.npz")


def test_only_a_few_rows_are_in_memory(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    path = save(tmp_path / "a.npz", X=draw.integers(9, size=(300, 100, 100)), y=np.zeros(300))
    assert sum(array.shape[0] * array.row_bytes for array in ArrayFile.open(path).arrays.values()) > 24_000_000
    tracemalloc.start()
    assert sum(len(record["inputs"]) for record in ArrayFile.open(path).read()) == 30_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6_000_000


def test_arrays_are_prepared_as_sequences(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    x, y, lengths = draw.normal(size=(40, 6, 2)), draw.integers(3, size=40), draw.integers(1, 7, size=40)
    path = save(tmp_path / "a.npz", X=x, y=y, lengths=lengths)
    (stored,) = prepare_sequences(path, tmp_path / "data", SequenceOptions(label="targets"))
    assert stored.fields.targets is not None and stored.fields.targets.names == ("0", "1", "2")
    rows = [(0, row) for row in range(40)]
    assert list(map(int, stored.read_row_targets(rows))) == y.tolist()
    for row, values in enumerate(stored.read(stored.step_ranges(rows))):
        assert np.array_equal(values, x[row, : lengths[row]].astype(np.float32))
