"""A scale covers its values, with few ticks, in order, whose labels differ."""

import math

from hypothesis import example, given
from hypothesis import strategies as st

from stretto.report.formatting import format_count
from stretto.report.ticks import choose_scale, format_short, linear, tick_formatter

values = st.floats(-1e200, 1e200)


@given(values, values, st.booleans())
@example(0.0, 5e-324, False)
@example(0.0, 5e-324, True)
def test_a_scale_covers_its_values_with_few_distinct_ticks(one: float, other: float, from_zero: bool) -> None:
    low, high = min(one, other), max(one, other)
    scale = choose_scale(low, high, 4, from_zero=from_zero)
    for value in (low, high):
        assert -1e-6 <= scale.fraction(value) <= 1 + 1e-6
    assert 1 <= len(scale.ticks) <= 8
    assert list(scale.ticks) == sorted(scale.ticks)
    if high - low > 1e-6 * max(abs(low), abs(high)):
        labels = [tick_formatter(scale)(tick) for tick in scale.ticks]
        assert len(set(labels)) == len(labels), labels
        assert all(len(label) <= 12 for label in labels), labels


@given(st.integers(1, 10**12))
def test_an_integer_axis_has_integer_ticks(high: int) -> None:
    scale = linear(0.0, float(high), 5, is_integer=True, is_tight=True)
    assert all(tick == round(tick) for tick in scale.ticks)
    assert scale.high == high


@given(st.floats(-1e300, 1e300))
def test_a_short_number_has_few_characters_and_small_error(value: float) -> None:
    text = format_short(value)
    assert len(text) <= 11
    scales = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    read = float(text.rstrip("kMBT").replace(",", "")) * scales.get(text[-1], 1.0)
    assert math.isclose(read, value, rel_tol=0.006, abs_tol=1e-320)


@given(st.floats(0, 9e14))
@example(999_999_999.0)
def test_a_count_is_never_in_scientific_notation(value: float) -> None:
    assert "e" not in format_count(value)
