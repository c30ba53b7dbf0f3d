"""A downsampled column keeps its sum, minimum and maximum in few buckets."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.report.downsampled_series import DownsampledSeries, exponential_mean, smooth


@given(st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(float("nan"))), max_size=300), st.integers(2, 20))
def test_downsampling_keeps_sums_extremes_and_order(values: list[float], max_buckets: int) -> None:
    table = DownsampledSeries("step", "value", max_buckets=max_buckets)
    for number, value in enumerate(values):
        table.add(number, value)
    finite = [value for value in values if value == value]
    steps, means, counts = table.mean("step"), table.mean("value"), table.count("value")
    assert table.num_rows == len(values) and len(steps) <= max_buckets
    assert (np.diff(steps) > 0).all()
    assert counts.sum() == len(finite) and np.isclose(table.total("value"), sum(finite), rtol=1e-9, atol=1e-3)
    if finite:
        assert np.isclose(np.nansum(means * counts), sum(finite), rtol=1e-9, atol=1e-3)
        assert np.nanmin(table.min("value")) == min(finite) and np.nanmax(table.max("value")) == max(finite)
    else:
        assert np.isnan(means).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(7, 500))
def test_reading_before_the_end_changes_nothing(length: int, pause: int) -> None:
    plain, read = DownsampledSeries("value", max_buckets=50), DownsampledSeries("value", max_buckets=50)
    for number in range(length):
        plain.add(float(number))
        read.add(float(number))
        if number % pause == 0:
            read.mean("value")
    assert (plain.mean("value") == read.mean("value")).all() and plain.bucket_size == read.bucket_size


def test_a_smoothed_line_does_not_lag() -> None:
    values, counts = np.linspace(0.0, 100.0, 101), np.ones(101)
    assert np.isclose(smooth(values, counts, 9)[20:80], values[20:80], atol=0.3).all()
    assert (exponential_mean(values, counts, np.full(101, 9.0))[20:] < values[20:]).all()
    assert np.allclose(smooth(np.full(50, 3.0), np.ones(50), 9), 3.0)
