"""Rows of an Arrow batch, with tensors as nested lists.

Arrow stores a tensor as the flat list of its numbers, and its shape beside it. Ray Data writes a column of arrays like
that: token ids of different lengths as `{"data": [5, 7, 2], "shape": [3]}`.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

_NAME, _METADATA = b"ARROW:extension:name", b"ARROW:extension:metadata"
_FIXED_SHAPE = ("ray.data.arrow_tensor", "ray.data.arrow_tensor_v2", "arrow.fixed_shape_tensor")  # in the type
_VARIABLE_SHAPE = ("ray.data.arrow_variable_shaped_tensor", "arrow.variable_shape_tensor")  # in each row


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
        shape = _shape(field)
        return [None if value is None else _nest(value, shape) for value in values]
    if extension in _VARIABLE_SHAPE:
        return [None if value is None else _nest(value["data"], value["shape"]) for value in values]
    return list(values)


def _shape(field: Any) -> Sequence[Any]:  # noqa: ANN401 - pyarrow has no types
    if _is_registered(field):
        return tuple(field.type.shape)
    tree = json.loads(field.metadata.get(_METADATA, b""))
    shape = tree.get("shape") if isinstance(tree, dict) else tree
    return shape if isinstance(shape, list) else []


def _nest(numbers: list[Any], shape: Sequence[Any]) -> list[Any]:
    """Return the numbers of a tensor as lists of lists."""
    is_shape = bool(shape) and all(isinstance(size, int) and size >= 0 for size in shape)
    if not is_shape or math.prod(shape) != len(numbers):
        raise ValueError(f"a tensor of shape {list(shape)} has {len(numbers)} numbers")
    if len(shape) == 1:
        return numbers
    size = math.prod(shape[1:])
    return [_nest(numbers[start : start + size], shape[1:]) for start in range(0, len(numbers), size or 1)]
