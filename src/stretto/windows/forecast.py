"""Forecast: what is asked of a series: its next values, scaled, and nothing where they are missing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from stretto.base.errors import DataError
from stretto.base.task import Task
from stretto.store.sequences import Channels, Sequences

Values = NDArray[np.float32]


@dataclass(frozen=True)
class Forecast:
    """At each step, the next `horizon` values of some channels.

    Values are scaled to mean 0 and spread 1, as training data has them. With `season`, what is asked is the difference
    to the value one season before it: a network that says nothing then repeats the last season.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    channels: tuple[int, ...]  # those that are asked for
    horizon: int = 1
    season: int = 0
    masks: bool = False  # one more input for each channel: is its value there?

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise DataError(f"horizon={self.horizon} asks for nothing; use at least 1")
        if self.season and self.season < self.horizon:
            raise DataError(
                f"season={self.season} is shorter than horizon={self.horizon}, so the value one season before is not "
                "known yet; use a multiple of the season, at least the horizon"
            )

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequences,
        horizon: int = 1,
        *,
        season: int = 0,
        targets: Sequence[str] = (),
        masks: bool = False,
    ) -> "Forecast":
        """Return the forecast of some channels (all of them, if none are named), scaled as the store says."""
        values = sequences.fields.values
        if not isinstance(values, Channels):
            raise DataError(f"{sequences.location} holds tokens, not channels; use feed='batches' or 'lanes'")
        targets = [targets] if isinstance(targets, str) else targets
        for name in targets:
            if name not in values.names:
                raise DataError(f"target {name!r} is not a channel of {sequences.location}; known are {values.names}")
            if list(targets).count(name) > 1:
                raise DataError(f"target {name!r} is named twice; name each channel once")
        channels = tuple(values.names.index(name) for name in targets) or tuple(range(len(values.names)))
        return cls(values.mean, values.std, channels, horizon, season, masks)

    @property
    def task(self) -> Task:
        """What goes in, and what is asked: for the first and the last block of a network."""
        num_inputs = len(self.mean) * (2 if self.masks else 1)
        return Task("channels", num_inputs, "values", self.horizon * len(self.channels))

    def inputs(self, values: NDArray[Any]) -> Values:
        """Return values `[steps, channels]` scaled, the mean where one is missing."""
        scaled = self._scale(values)
        missing = np.isnan(scaled)
        filled = np.where(missing, np.float32(0), scaled)
        return np.concatenate([filled, ~missing], axis=1, dtype=np.float32) if self.masks else filled

    def targets(self, values: NDArray[Any], start: int, stop: int) -> Values:
        """Return what is asked from step `start` up to `stop`: `[steps, horizon * channels]`, NaN where it is missing.

        `values` may begin before `start`, for the season, and go on after `stop`, for the horizon; what lies beyond
        them is missing.
        """
        scaled = self._scale(values)[:, list(self.channels)]
        future = _ahead(scaled, start + 1, stop - start, self.horizon)
        if self.season:
            future = future - _ahead(scaled, start + 1 - self.season, stop - start, self.horizon)
        return np.array(future.transpose(0, 2, 1)).reshape(stop - start, self.task.num_outputs)

    def to_predictions(self, outputs: NDArray[Any], values: NDArray[Any]) -> Values:
        """Return what a network said at the last step of `values`, in real units: `[horizon, channels]`.

        The way back from `targets`. It is NaN where it adds to a season of which the value is missing.
        """
        scaled = outputs.astype(np.float32).reshape(self.horizon, len(self.channels))
        if self.season:
            # The last season is all that is needed, however long the series is; it may have begun within it.
            last = self._scale(values[-self.season :])[:, list(self.channels)]
            scaled = scaled + _ahead(last, len(last) - self.season, 1, self.horizon)[0].T
        return self.unscale(scaled)

    def unscale(self, scaled: Values) -> Values:
        """Return scaled values `[..., channels]` of the channels that are asked for, in real units."""
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        return scaled * std[list(self.channels)] + mean[list(self.channels)]

    def _scale(self, values: NDArray[Any]) -> Values:
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        scaled: Values = (values.astype(np.float32) - mean) / std
        return scaled


def _ahead(values: Values, start: int, num_steps: int, horizon: int) -> Values:
    """The `horizon` values from each of the steps from `start` on, `[steps, channels, horizon]`."""
    size = num_steps + horizon
    padded = np.full((size, values.shape[1]), np.nan, np.float32)
    first, last = max(start, 0), min(start + size, len(values))
    if first < last:
        padded[first - start : last - start] = values[first:last]
    return sliding_window_view(padded, horizon, axis=0)[:num_steps]
