"""Forecasts: sliding windows and their targets, compared with a plain loop."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.stores import write_series
from stretto.data import Batches, ForecastTransform, Position, SlidingWindows
from stretto.errors import DataError

EXAMPLES = settings(max_examples=60, deadline=None)


@given(
    lengths=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), min_size=1, max_size=3),
    context=st.integers(1, 8), horizon=st.integers(1, 6), stride=st.integers(1, 4), every_step=st.booleans(),
    is_seasonal=st.booleans(),
)  # fmt: skip
@EXAMPLES
def test_every_window_of_a_series_comes_once_per_epoch_with_the_values_after_it(
    lengths: list[list[int]], context: int, horizon: int, stride: int, every_step: bool, is_seasonal: bool
) -> None:
    generator = np.random.default_rng(0)
    shards = [[generator.normal(3, 2, (length, 2)).astype(np.float32) for length in shard] for shard in lengths]
    season = min(context, horizon + 1) if is_seasonal and context >= horizon else 0
    everything = [series for shard in shards for series in shard]
    expected = []
    mean = np.nanmean(np.concatenate(everything).astype(np.float64), axis=0)
    std = np.nanstd(np.concatenate(everything).astype(np.float64), axis=0)
    for series in everything:
        scaled = (series - mean) / np.where(std == 0, np.nan, std)
        for start in range(0, len(series) - context - horizon + 1, stride):
            row = scaled[start : start + context + horizon]
            targets = [
                [
                    row[step + ahead, channel] - (_before(row, step + ahead - season, channel) if season else 0)
                    if every_step or step == context - 1
                    else np.nan
                    for ahead in range(1, horizon + 1)
                    for channel in (0, 1)
                ]
                for step in range(context)
            ]
            expected.append((row[:context], np.array(targets)))
    with tempfile.TemporaryDirectory() as folder:
        if not np.all(std > 1e-3):
            return
        sequences = write_series(Path(folder) / "store", shards)
        forecast = ForecastTransform.from_sequences(sequences, horizon, season=season)
        if not expected:
            with pytest.raises(DataError, match="no series has the"):
                SlidingWindows(sequences, forecast, context, stride, every_step)
            return
        data = Batches(SlidingWindows(sequences, forecast, context, stride, every_step), 10 * context)
        actual, position = [], Position()
        while position.epoch == 0:
            window = data.read(position)
            assert window.inputs is not None and window.targets is not None
            actual += [
                (window.inputs[:, row].numpy(), window.targets[:, row].numpy()) for row in range(window.num_rows)
            ]
            position = data.next_position(position)

    def sort_key(row: tuple[np.ndarray, np.ndarray]) -> list[float]:
        return [round(float(value), 3) for value in row[0].ravel()]

    assert len(actual) == len(expected)
    for (x, actual_targets), (expected_x, expected_targets) in zip(
        sorted(actual, key=sort_key), sorted(expected, key=sort_key), strict=True
    ):
        np.testing.assert_allclose(x, expected_x, atol=1e-4)
        np.testing.assert_allclose(actual_targets, expected_targets, atol=1e-4)


def _before(row: np.ndarray, step: int, channel: int) -> float:
    return float(row[step, channel]) if step >= 0 else np.nan


def test_with_a_season_targets_are_differences_to_the_last_season(tmp_path: Path) -> None:
    series = np.tile(np.array([1.0, 5.0, 2.0], np.float32), 8).reshape(-1, 1)
    sequences = write_series(tmp_path / "store", [[series]])
    data = Batches(SlidingWindows(sequences, ForecastTransform.from_sequences(sequences, 3, season=3), 6), 60)
    targets = data.read(Position()).targets
    assert targets is not None and targets[-1].abs().max() < 1e-6, "a series that repeats itself has no differences"


def test_impossible_forecasts_are_refused(tmp_path: Path) -> None:
    sequences = write_series(tmp_path / "store", [[np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32)]])
    with pytest.raises(DataError, match="target 'x' is not a channel of"):
        ForecastTransform.from_sequences(sequences, targets=["x"])
    with pytest.raises(DataError, match="season=2 is shorter than horizon=3"):
        ForecastTransform.from_sequences(sequences, 3, season=2)
    with pytest.raises(DataError, match="horizon=0"):
        ForecastTransform.from_sequences(sequences, 0)
    with pytest.raises(DataError, match="season=4 exceeds context=2"):
        SlidingWindows(sequences, ForecastTransform.from_sequences(sequences, 1, season=4), 2)
    with pytest.raises(DataError, match=r"no series has the 8 \+ 2 time steps of context and horizon"):
        SlidingWindows(sequences, ForecastTransform.from_sequences(sequences, 2), 8)
    windows = SlidingWindows(sequences, ForecastTransform.from_sequences(sequences), 8)
    with pytest.raises(DataError, match=r"context=8 exceeds data\.budget=7; raise the budget"):
        Batches(windows, budget=7)
