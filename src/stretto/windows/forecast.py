"""ForecastTransform: turns a time series into scaled inputs and targets; a missing value is not a target."""

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
class ForecastTransform:
    """Makes inputs and targets: the targets of each time step are the next `horizon` values of some channels.

    Values are scaled with the mean and standard deviation of the training data. With `season`, a target is the
    difference from the value one season earlier, so a network that outputs zeros repeats the last season.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    target_channels: tuple[int, ...]  # indices
    horizon: int = 1  # in time steps, like `season`
    season: int = 0  # 0: none
    masks: bool = False  # add one input per channel: 1 where its value is present, 0 where it is missing

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise DataError(f"horizon={self.horizon} predicts nothing; use at least 1")
        if self.season and self.season < self.horizon:
            raise DataError(
                f"season={self.season} is shorter than horizon={self.horizon}, so the value one season earlier is not "
                "known yet; use a multiple of the season that is at least the horizon"
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
        scale: bool = True,
    ) -> "ForecastTransform":
        """Return a transform for the channels named in `targets` (default: all), with the data's saved mean and std.

        Without `scale`, values are used as they are.
        """
        values = sequences.fields.values
        if not isinstance(values, Channels):
            raise DataError(f"{sequences.location} holds tokens, not channels; use data.feed='batches' or 'lanes'")
        targets = [targets] if isinstance(targets, str) else targets
        names = ", ".join(values.names)
        for name in targets:
            if name not in values.names:
                raise DataError(f"target {name!r} is not a channel of {sequences.location}; choose from {names}")
            if list(targets).count(name) > 1:
                raise DataError(f"target {name!r} is listed more than once; list each channel once")
        channels = tuple(values.names.index(name) for name in targets) or tuple(range(len(values.names)))
        count = len(values.names)
        mean, std = (values.mean, values.std) if scale else ((0.0,) * count, (1.0,) * count)
        return cls(mean, std, channels, horizon, season, masks)

    @property
    def task(self) -> Task:
        """The number and type of inputs and outputs that a network needs."""
        num_inputs = len(self.mean) * (2 if self.masks else 1)
        return Task("channels", num_inputs, "horizon", self.horizon * len(self.target_channels))

    def inputs(self, values: NDArray[Any]) -> Values:
        """Return scaled values `[time, channels]`, 0 (the mean) where missing; `masks` adds a mask per channel."""
        scaled = self._scale(values)
        is_missing = np.isnan(scaled)
        filled = np.where(is_missing, np.float32(0), scaled)
        return np.concatenate([filled, ~is_missing], axis=1, dtype=np.float32) if self.masks else filled

    def targets(self, values: NDArray[Any], start: int, stop: int) -> Values:
        """Return the targets of time steps `start` to `stop` of `values`: `[time, horizon * targets]`, NaN if missing.

        `values` may begin before `start` (for the season) and end after `stop` (for the horizon). What lies outside
        of `values` counts as missing.
        """
        scaled = self._scale(values)[:, list(self.target_channels)]
        future = _horizon_windows(scaled, start + 1, stop - start, self.horizon)
        if self.season:
            future = future - _horizon_windows(scaled, start + 1 - self.season, stop - start, self.horizon)
        return np.array(future.transpose(0, 2, 1)).reshape(stop - start, self.task.num_outputs)  # a writable copy

    def to_predictions(self, outputs: NDArray[Any], values: NDArray[Any]) -> Values:
        """Return the forecast `[horizon, targets]` in the series' units from outputs at the last time step of `values`.

        The inverse of `targets`. NaN where the value one season earlier is missing.
        """
        return self.to_quantiles(outputs, values)[..., 0]

    def to_quantiles(self, outputs: NDArray[Any], values: NDArray[Any]) -> Values:
        """Return the forecast `[horizon, targets, quantiles]`, as `to_predictions`; outputs have all quantiles.

        Quantiles that cross are sorted, which never increases the loss.
        """
        scaled = np.sort(outputs.astype(np.float32).reshape(self.horizon, len(self.target_channels), -1), axis=-1)
        if self.season:
            # Only the last season is needed, however long the series is; a short series may not have all of it.
            last_season = self._scale(values[-self.season :])[:, list(self.target_channels)]
            before = _horizon_windows(last_season, len(last_season) - self.season, 1, self.horizon)[0].T
            scaled = scaled + before[..., None]
        return self.unscale(scaled.swapaxes(1, 2)).swapaxes(1, 2)

    def unscale(self, scaled: Values) -> Values:
        """Return scaled values of the target channels, `[..., targets]`, in the units of the series."""
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        return scaled * std[list(self.target_channels)] + mean[list(self.target_channels)]

    def _scale(self, values: NDArray[Any]) -> Values:
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        scaled: Values = (values.astype(np.float32) - mean) / std
        return scaled


def _horizon_windows(values: Values, start: int, num_steps: int, horizon: int) -> Values:
    """Return `values[t:t+horizon]` for `num_steps` steps t from `start`: `[time, channels, horizon]`, NaN outside."""
    size = num_steps + horizon  # one more than needed, so that `num_steps` may be 0
    padded = np.full((size, values.shape[1]), np.nan, np.float32)
    first, stop = max(start, 0), min(start + size, len(values))
    if first < stop:
        padded[first - start : stop - start] = values[first:stop]
    return sliding_window_view(padded, horizon, axis=0)[:num_steps]
