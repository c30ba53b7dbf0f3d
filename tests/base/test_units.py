"""Times and sizes are formatted with a unit that fits."""

import math

import pytest

from stretto.base.units import format_bytes, format_duration, format_seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0002, "0.2 ms"), (0.9994, "999 ms"), (0.99999, "1 s"), (12.34, "12.3 s"), (math.nan, "-")],
)
def test_a_short_time_has_three_digits(value: float, text: str) -> None:
    assert format_seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 s"), (0.82, "820 ms"), (41.2, "41.2 s"), (725, "12 min 5 s"), (3600, "1 h"), (12000, "3 h 20 min"),
     (187200, "2 d 4 h"), (math.inf, "-")],
)  # fmt: skip
def test_a_duration_has_at_most_two_units(value: float, text: str) -> None:
    assert format_duration(value) == text


def test_a_size_has_a_unit() -> None:
    assert [format_bytes(size) for size in (400, 5e6, 9.999e8, 1.234e9)] == ["0.4 kB", "5 MB", "1 GB", "1.23 GB"]
    assert format_bytes(math.nan) == "-"
