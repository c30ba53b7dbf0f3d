"""Rows of an Arrow batch, with tensors as nested lists.

Arrow stores a tensor as the flat list of its numbers, and its shape beside it. Ray Data writes a column of arrays like
that: token ids of different lengths as `{"data": [5, 7, 2], "shape": [3]}`.
"""

import math
from collections.abc import Sequence
from typing import Any

from stretto.base.bounded_read import parse_json

_NAME, _METADATA = b"ARROW:extension:name", b"ARROW:extension:metadata"
_FIXED_SHAPE = ("ray.data.arrow_tensor", "ray.data.arrow_tensor_v2", "arrow.fixed_shape_tensor")  # in the type
_VARIABLE_SHAPE = ("ray.data.arrow_variable_shaped_tensor", "arrow.variable_shape_tensor")  # in each row
_MAX_DIMS = 8


def batch_rows(batch: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - pyarrow has no types
    """Return the rows of a record batch as plain Python values; raise ValueError if a tensor is damaged."""
    extensions = [_extension_name(field) for field in batch.schema]
    if not any(name.startswith("ray.") or name in (*_FIXED_SHAPE, *_VARIABLE_SHAPE) for name in extensions):
        rows: list[dict[str, Any]] = batch.to_pylist()
        return rows
    columns = [_column(*column) for column in zip(batch.schema, extensions, batch.columns, strict=True)]
    return [dict(zip(batch.schema.names, values, strict=True)) for values in zip(*columns, strict=True)]


def _extension_name(field: Any) -> str:  # noqa: ANN401 - pyarrow has no types
    """Return the name of a field's extension type, whether or not the type is registered; empty if it has none."""
    if _is_registered(field):
        return str(field.type.extension_name)
    name: bytes = (field.metadata or {}).get(_NAME, b"")
    return name.decode(errors="replace")


def _is_registered(field: Any) -> bool:  # noqa: ANN401 - pyarrow has no types
    import pyarrow

    return isinstance(field.type, pyarrow.BaseExtensionType)


def _column(field: Any, extension: str, column: Any) -> list[Any]:  # noqa: ANN401 - pyarrow has no types
    # The storage of a type that Ray registers, if it was imported: one of its types would unpickle the values.
    values = (column.storage if _is_registered(field) else column).to_pylist()
    if extension in _FIXED_SHAPE:
        _check_row_major(field, extension)
        shape = _shape(field)
        return [None if value is None else _nest(value, shape) for value in values]
    if extension in _VARIABLE_SHAPE:
        _check_row_major(field, extension)
        return [None if value is None else _nest(*_data_and_shape(value)) for value in values]
    return list(values)


def _shape(field: Any) -> object:  # noqa: ANN401 - pyarrow has no types
    if _is_registered(field):
        return list(field.type.shape)
    tree = parse_json(_type_metadata(field))
    return tree.get("shape") if isinstance(tree, dict) else tree


def _data_and_shape(value: object) -> tuple[object, object]:
    if not isinstance(value, dict) or not {"data", "shape"} <= value.keys():
        raise ValueError("a tensor has no `data` and `shape`")
    return value["data"], value["shape"]


def _check_row_major(field: Any, extension: str) -> None:  # noqa: ANN401 - pyarrow has no types
    """Refuse a tensor of Arrow whose dims are stored in another order, as that of a transposed array."""
    import pyarrow

    if isinstance(field.type, pyarrow.FixedShapeTensorType):
        permutation = field.type.permutation
    else:
        metadata = _type_metadata(field) if extension.startswith("arrow.") else b""
        tree = parse_json(metadata) if metadata else None
        permutation = tree.get("permutation") if isinstance(tree, dict) else None
    if not isinstance(permutation, list | None):
        raise ValueError(f"a tensor has the permutation {permutation!r:.40}, which is not a list")
    if permutation and permutation != list(range(len(permutation))):
        raise ValueError(f"a tensor has the permutation {permutation} and is not in row-major order")


def _type_metadata(field: Any) -> bytes:  # noqa: ANN401 - pyarrow has no types
    """Return the parameters of an extension type that is not registered, as they are in the file."""
    return bytes((field.metadata or {}).get(_METADATA, b""))


def _nest(numbers: object, shape: object) -> list[Any]:
    """Return the numbers of a tensor as lists of lists; raise ValueError if they don't fit its shape."""
    if not isinstance(numbers, list) or not isinstance(shape, list):
        raise ValueError("a tensor has no list of numbers, or no shape")
    if len(shape) > _MAX_DIMS:
        raise ValueError(f"a tensor has {len(shape)} dims, more than {_MAX_DIMS}")
    is_shape = bool(shape) and all(isinstance(size, int) and size >= 0 for size in shape)
    if not is_shape or math.prod(shape) != len(numbers):
        raise ValueError(f"a tensor of shape {shape} has {len(numbers)} numbers")
    return _nest_lists(numbers, shape)


def _nest_lists(numbers: list[Any], shape: Sequence[int]) -> list[Any]:
    if len(shape) == 1:
        return numbers
    size = math.prod(shape[1:])
    return [_nest_lists(numbers[start : start + size], shape[1:]) for start in range(0, len(numbers), size or 1)]
