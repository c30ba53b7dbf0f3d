"""Parameters of a long test of which CI runs only some."""

from collections.abc import Iterable
from typing import Any

import pytest


def some_short(values: Iterable[object], num_short: int = 1) -> list[Any]:
    """Return values, or tuples of them, as parameters; the first `num_short` are `short`: CI runs them."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=[pytest.mark.short] * (index < num_short)
        )
        for index, value in enumerate(values)
    ]
