"""Arrays of numbers in JSON as their bytes: several times faster to write and to read than as text."""

import base64
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

_KEY = "stretto.array"


def encode_array(array: NDArray[Any]) -> object:
    """Return what JSON holds for an array; `decode_array` makes the values of its `tolist` of it."""
    # A long double has no Python number, and a text is JSON already.
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8 or not array.ndim:
        return array.tolist()
    content = base64.b64encode(array.tobytes()).decode("ascii")
    return {_KEY: [array.dtype.str, list(array.shape), content]}


def decode_array(value: dict[str, Any]) -> object:
    """Return the nested lists of an array; another JSON object unchanged. For `json.loads(object_hook=...)`."""
    if value.keys() != {_KEY}:
        return value
    dtype, shape, content = value[_KEY]
    array = np.frombuffer(base64.b64decode(content), dtype, math.prod(shape))
    return array.reshape(shape).tolist()
