"""Parquet of sequences in any type that Arrow and Ray Data have for them gives the same store."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers.stores import rows_of
from stretto.data import SequenceOptions, prepare_sequences
from stretto.errors import DataError
from stretto.prepare.arrow_tensors import batch_rows

INTEGERS = (pyarrow.uint8(), pyarrow.int8(), pyarrow.uint16(), pyarrow.int32(), pyarrow.uint32(), pyarrow.int64())
LISTS = ("list", "large_list", "list_view", "fixed_size_list", "dictionary", "ray_tensor", "arrow_tensor", "ray_ragged")


def extension(name: str, metadata: str, values: pyarrow.Array) -> tuple[pyarrow.Field, pyarrow.Array]:
    """Return a field and a column as a reader sees them that does not know the extension type."""
    keys = {"ARROW:extension:name": name, "ARROW:extension:metadata": metadata}
    return pyarrow.field("tokens", values.type, metadata=keys), values


def make_column(kind: str, integer: pyarrow.DataType, rows: list[list[int]]) -> tuple[pyarrow.Field, pyarrow.Array]:
    """Return rows of token ids as a column; those with a fixed shape have rows of the same length."""
    length = len(rows[0])
    if kind == "ray_ragged":
        shape = pyarrow.array([[len(row)] for row in rows], pyarrow.list_(pyarrow.int64()))
        data = pyarrow.array(rows, pyarrow.large_list(integer))
        tensors = pyarrow.StructArray.from_arrays([data, shape], ["data", "shape"])
        return extension("ray.data.arrow_variable_shaped_tensor", "1", tensors)
    if kind == "ray_tensor":
        return extension("ray.data.arrow_tensor_v2", f"[{length}]", pyarrow.array(rows, pyarrow.large_list(integer)))
    if kind == "arrow_tensor":
        storage = pyarrow.array(rows, pyarrow.list_(integer, length))
        column = pyarrow.ExtensionArray.from_storage(pyarrow.fixed_shape_tensor(integer, [length]), storage)
        return pyarrow.field("tokens", column.type), column
    types = {
        "list": pyarrow.list_(integer),
        "large_list": pyarrow.large_list(integer),
        "list_view": pyarrow.list_view(integer),
        "fixed_size_list": pyarrow.list_(integer, length),
        "dictionary": pyarrow.list_(pyarrow.dictionary(pyarrow.int32(), integer)),
    }
    return pyarrow.field("tokens", types[kind]), pyarrow.array(rows, types[kind])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 127), min_size=1, max_size=9), min_size=1, max_size=20),
    kind=st.sampled_from(LISTS),
    integer=st.sampled_from(INTEGERS),
    is_dictionary_encoded=st.booleans(),
    is_compliant=st.booleans(),
    row_group_size=st.integers(1, 30),
)
def test_token_ids_of_any_type_are_read_as_they_are(
    rows: list[list[int]],
    kind: str,
    integer: pyarrow.DataType,
    is_dictionary_encoded: bool,
    is_compliant: bool,
    row_group_size: int,
) -> None:
    if kind in ("fixed_size_list", "ray_tensor", "arrow_tensor"):
        rows = [[*row, *[0] * 9][:5] for row in rows]
    field, column = make_column(kind, integer, rows)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.parquet")
        table = pyarrow.table([column], schema=pyarrow.schema([field]))
        try:
            pyarrow.parquet.write_table(
                table, path, row_group_size=row_group_size, use_dictionary=is_dictionary_encoded,
                use_compliant_nested_type=is_compliant,
            )  # fmt: skip
        except pyarrow.ArrowNotImplementedError:
            assert kind == "list_view", "an older pyarrow can't write these"
            assume(False)
        (sequences,) = prepare_sequences(path, Path(folder, "out"), SequenceOptions(num_tokens=128), workers=1)
        assert rows_of(sequences) == rows


@pytest.mark.parametrize("kind", ["ray.data.arrow_tensor", "ray.data.arrow_tensor_v2", "ragged", "arrow"])
def test_matrices_are_channels(kind: str, tmp_path: Path) -> None:
    rows = [np.arange(6.0).reshape(3, 2) + row for row in range(4)]
    flat = [row.flatten().tolist() for row in rows]
    if kind == "arrow":
        storage = pyarrow.array(flat, pyarrow.list_(pyarrow.float32(), 6))
        column = pyarrow.ExtensionArray.from_storage(pyarrow.fixed_shape_tensor(pyarrow.float32(), [3, 2]), storage)
        field = pyarrow.field("tokens", column.type)
    elif kind == "ragged":
        shape = pyarrow.array([[3, 2]] * 4)
        column = pyarrow.StructArray.from_arrays([pyarrow.array(flat), shape], ["data", "shape"])
        field, column = extension("ray.data.arrow_variable_shaped_tensor", "2", column)
    else:
        field, column = extension(kind, "[3, 2]", pyarrow.array(flat))
    table = pyarrow.table([column], schema=pyarrow.schema([field]))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    (sequences,) = prepare_sequences(
        tmp_path / "a.parquet", tmp_path / "out", SequenceOptions(sequence="tokens", read_as="channels")
    )
    assert rows_of(sequences) == [row.tolist() for row in rows]


def write_tensors(path: Path, field: pyarrow.Field, column: pyarrow.Array) -> None:
    pyarrow.parquet.write_table(pyarrow.table([column], schema=pyarrow.schema([field])), path)


def test_a_transposed_matrix_is_refused(tmp_path: Path) -> None:
    """Arrow stores it with a permutation: without that, time and channels are swapped."""
    path, options = tmp_path / "a.parquet", SequenceOptions(sequence="tokens", read_as="channels")
    matrices = np.arange(16.0, dtype=np.float32).reshape(4, 2, 2)
    refused = r"a\.parquet can't be read \(a tensor has the permutation \[1, 0\] and is not in row-major order\)"
    column = pyarrow.FixedShapeTensorArray.from_numpy_ndarray(matrices.transpose(0, 2, 1))
    write_tensors(path, pyarrow.field("tokens", column.type), column)
    with pytest.raises(DataError, match=refused):
        prepare_sequences(path, tmp_path / "out", options)
    field, storage = extension("arrow.fixed_shape_tensor", '{"shape": [2, 2], "permutation": [1, 0]}', column.storage)
    with pytest.raises(ValueError, match="a tensor has the permutation"):
        batch_rows(pyarrow.record_batch([storage], schema=pyarrow.schema([field])))
    # The same function in row-major order.
    column = pyarrow.FixedShapeTensorArray.from_numpy_ndarray(matrices)
    write_tensors(path, pyarrow.field("tokens", column.type), column)
    (sequences,) = prepare_sequences(path, tmp_path / "out", options)
    assert rows_of(sequences) == matrices.tolist()


def test_ragged_tensors_with_a_permutation_are_refused() -> None:
    column = pyarrow.array([{"data": [1, 2, 3, 4], "shape": [2, 2]}])
    for permutation, is_refused in ("[1, 0]", True), ("1", True), ("[0, 1]", False), ("null", False):
        field, _ = extension("arrow.variable_shape_tensor", f'{{"permutation": {permutation}}}', column)
        batch = pyarrow.record_batch([column], schema=pyarrow.schema([field]))
        if is_refused:
            with pytest.raises(ValueError, match="permutation"):
                batch_rows(batch)
        else:
            assert batch_rows(batch) == [{"tokens": [[1, 2], [3, 4]]}]


SHAPES = pyarrow.list_(pyarrow.int64())
DAMAGED = {
    "no data": pyarrow.array([{"data": None, "shape": [3]}], pyarrow.struct([("data", SHAPES), ("shape", SHAPES)])),
    "no shape": pyarrow.array([{"data": [3], "shape": None}], pyarrow.struct([("data", SHAPES), ("shape", SHAPES)])),
    "not lists": pyarrow.array([{"data": 3, "shape": 1}]),
    "other fields": pyarrow.array([{"values": [1, 2, 3]}]),
    "a list": pyarrow.array([[1, 2, 3]]),
    "many dims": pyarrow.array([{"data": [1], "shape": [1] * 2000}]),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_column_of_ragged_tensors_is_an_error(damage: str, tmp_path: Path) -> None:
    field, column = extension("ray.data.arrow_variable_shaped_tensor", "1", DAMAGED[damage])
    write_tensors(tmp_path / "a.parquet", field, column)
    with pytest.raises(DataError, match=r"a\.parquet can't be read \(a tensor has .*\); copy or write it again"):
        prepare_sequences(tmp_path / "a.parquet", tmp_path / "out", SequenceOptions(sequence="tokens"))


class PickledType(pyarrow.ExtensionType):  # type: ignore[misc]
    """A type that Ray registers: its values are pickles, which a reader must not load."""

    def __init__(self) -> None:
        super().__init__(pyarrow.large_binary(), "ray.data.arrow_pickled_object")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: object, serialized: bytes) -> "PickledType":
        return cls()

    def __arrow_ext_scalar_class__(self) -> type:
        return PickledScalar


class PickledScalar(pyarrow.ExtensionScalar):  # type: ignore[misc]
    def as_py(self, **options: object) -> object:
        raise AssertionError("a pickle was loaded")


def test_a_registered_type_of_ray_is_read_as_bytes() -> None:
    column = pyarrow.ExtensionArray.from_storage(PickledType(), pyarrow.array([b"a pickle"], pyarrow.large_binary()))
    batch = pyarrow.record_batch([column], ["object"])
    with pytest.raises(AssertionError, match="a pickle was loaded"):
        batch.to_pylist()
    assert batch_rows(batch) == [{"object": b"a pickle"}]


@pytest.mark.parametrize("shape", [[10**12], [2, 10**12], [0, 3], [], [-3, -1]])
def test_a_tensor_whose_shape_does_not_fit_is_an_error(shape: list[int], tmp_path: Path) -> None:
    data, shapes = pyarrow.array([[1, 2, 3]]), pyarrow.array([shape], pyarrow.list_(pyarrow.int64()))
    ragged = pyarrow.StructArray.from_arrays([data, shapes], ["data", "shape"])
    for name, column in ("ray.data.arrow_variable_shaped_tensor", ragged), ("ray.data.arrow_tensor_v2", data):
        field, _ = extension(name, json.dumps(shape), column)
        table = pyarrow.table([column], schema=pyarrow.schema([field]))
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(DataError, match=r"a\.parquet can't be read \(a tensor of shape .* has 3 numbers\)"):
            prepare_sequences(tmp_path / "a.parquet", tmp_path / "out", SequenceOptions(sequence="tokens"))


@pytest.mark.parametrize("metadata", ["", "3", "[1.5, 2]", '["3"]', "{}", '{"shape": 3}', "[" * 9999])
def test_a_tensor_type_without_a_shape_is_an_error(metadata: str, tmp_path: Path) -> None:
    field, column = extension("ray.data.arrow_tensor", metadata, pyarrow.array([[1, 2, 3]]))
    pyarrow.parquet.write_table(pyarrow.table([column], schema=pyarrow.schema([field])), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet can't be read \(.*\); copy or write it again"):
        prepare_sequences(tmp_path / "a.parquet", tmp_path / "out", SequenceOptions(sequence="tokens"))
