"""ForecastTransform: turns a time series into scaled inputs and targets; a missing value is not a target.

inputs at step t     all channels at t, then the known-future channels at t+1, ..., t+horizon
targets at step t    the target channels at t+1, ..., t+horizon
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from stretto.base.errors import DataError
from stretto.base.task import CategoryInputs, Task
from stretto.store.sequences import Channels, Sequences

Values = NDArray[np.float32]


@dataclass(frozen=True)
class ForecastTransform:
    """Makes inputs and targets: the targets of each time step are the next `horizon` values of some channels.

    Values are scaled with the mean and standard deviation of the training data. With `season`, a target is the
    difference from the value one season earlier, so a network that outputs zeros repeats the last season. The inputs of
    each time step are all channels, and the next `horizon` values of the channels `known_future`.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    target_channels: tuple[int, ...]  # indices
    horizon: int = 1  # in time steps, like `season`
    season: int = 0  # 0: none
    masks: bool = False  # add one input for each input: 1 where its value is present, 0 where it is missing
    known_future: tuple[int, ...] = ()  # indices of channels whose values are known ahead of time
    static: tuple[int, ...] = ()  # indices of channels that are constant within a series
    categories: tuple[tuple[int, int], ...] = ()  # index and number of names of channels that have codes, not numbers

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise DataError(f"horizon={self.horizon} predicts nothing; use at least 1")
        if self.season and self.season < self.horizon:
            raise DataError(
                f"season={self.season} is shorter than horizon={self.horizon}, so the value one season earlier is not "
                "known yet; use a multiple of the season that is at least the horizon"
            )
        if not self.target_channels:
            raise DataError("known_future and static name all numbers, so nothing is left to forecast; name fewer")

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
        known_future: Sequence[str] | None = None,
        static: Sequence[str] | None = None,
    ) -> "ForecastTransform":
        """Return a transform for the channels named in `targets`, with the data's saved mean and std.

        `known_future` and `static` are by default those that the data was prepared with, and `targets` all other
        channels of numbers. Without `scale`, values are used as they are.
        """
        values = sequences.fields.values
        if not isinstance(values, Channels):
            raise DataError(f"{sequences.location} holds tokens, not channels; use data.feed='batches' or 'lanes'")
        location = sequences.location
        known_future = values.known_future if known_future is None else known_future
        static = values.static if static is None else static
        future_indices = _find_channels("known_future", known_future, values, location)
        static_indices = _find_channels("static", static, values, location)
        target_indices = _find_channels("target", targets, values, location)
        for index in {*future_indices, *static_indices} & {*target_indices} or {*future_indices} & {*static_indices}:
            raise DataError(
                f"{values.names[index]!r} is named in more than one of targets, known_future and static; keep one"
            )
        categories = values.category_sizes
        for index in {index for index, _ in categories} & {*target_indices}:
            raise DataError(
                f"target {values.names[index]!r} has text, which can't be forecast; prepare the data with "
                f"targets={values.names[index]} to predict its class at each time step"
            )
        inputs_only = {*future_indices, *static_indices, *(index for index, _ in categories)}
        target_indices = target_indices or tuple(i for i in range(len(values.names)) if i not in inputs_only)
        count = len(values.names)
        mean, std = (values.mean, values.std) if scale else ((0.0,) * count, (1.0,) * count)
        return cls(mean, std, target_indices, horizon, season, masks, future_indices, static_indices, categories)

    @property
    def task(self) -> Task:
        """The number and type of inputs and outputs that a network needs."""
        num_inputs = (len(self.mean) + self.horizon * len(self.known_future)) * (2 if self.masks else 1)
        categories = tuple(CategoryInputs(size, self._inputs_of(channel)) for channel, size in self.categories)
        return Task("channels", num_inputs, "horizon", self.horizon * len(self.target_channels), categories)

    def _inputs_of(self, channel: int) -> tuple[int, ...]:
        """Return the indices of a channel's inputs: its value now and, if known, at each time step of the horizon."""
        if channel not in self.known_future:
            return (channel,)
        first, stride = len(self.mean) + self.known_future.index(channel), len(self.known_future)
        return (channel, *(first + step * stride for step in range(self.horizon)))

    @property
    def target_std(self) -> tuple[float, ...]:
        """The standard deviation that each target of a time step is divided by, in the order of `targets`."""
        return tuple(self.std[index] for index in self.target_channels) * self.horizon

    @property
    def unknown_channels(self) -> tuple[int, ...]:
        """Indices of the channels that are not known ahead of time."""
        return tuple(i for i in range(len(self.mean)) if i not in self.known_future and i not in self.static)

    @property
    def unknown_numbers(self) -> tuple[int, ...]:
        """Indices of the channels of numbers that are not known ahead of time."""
        codes = {channel for channel, _ in self.categories}
        return tuple(channel for channel in self.unknown_channels if channel not in codes)

    def count_known(self, values: NDArray[Any]) -> int:
        """Return the number of time steps up to the last one to forecast from.

        With known-future channels, the last rows of `values` that have no other number hold the known future.
        """
        if not self.known_future:
            return len(values)
        has_values = ~np.isnan(values[:, list(self.unknown_numbers)]).all(axis=1)
        return int(np.flatnonzero(has_values)[-1]) + 1 if has_values.any() else 0

    def inputs(self, values: NDArray[Any], start: int = 0, stop: int | None = None) -> Values:
        """Return the inputs of time steps `start` to `stop` (default: all) of `values` `[time, channels]`.

        `values` may end after `stop`, for the known future. Inputs are scaled, and 0 (the mean) where a value is
        missing or outside of `values`; `masks` adds a mask for each.
        """
        stop = len(values) if stop is None else stop
        all_scaled = self._scale(values[start : stop + self.horizon])
        scaled = all_scaled[: stop - start]
        if self.known_future:
            known = all_scaled[:, list(self.known_future)]
            future = _horizon_windows(known, 1, stop - start, self.horizon).transpose(0, 2, 1)
            scaled = np.concatenate([scaled, future.reshape(stop - start, -1)], axis=1)
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


def column_names(channels: Sequence[str], quantiles: Sequence[float]) -> tuple[str, ...]:
    """Return the names of a forecast's columns: the channels, or each with its quantiles, as `load@0.1`."""
    if not quantiles:
        return tuple(channels)
    return tuple(f"{channel}@{quantile}" for channel in channels for quantile in quantiles)


def _find_channels(option: str, names: Sequence[str] | str, channels: Channels, location: str) -> tuple[int, ...]:
    """Return the indices of the channels that an option names."""
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if name not in channels.names:
            known = ", ".join(channels.names)
            raise DataError(f"{option} {name!r} is not a channel of {location}; choose from {known}")
        if names.count(name) > 1:
            raise DataError(f"{option} {name!r} is listed more than once; list each channel once")
    return tuple(map(channels.names.index, names))


def _horizon_windows(values: Values, start: int, num_steps: int, horizon: int) -> Values:
    """Return `values[t:t+horizon]` for `num_steps` steps t from `start`: `[time, channels, horizon]`, NaN outside."""
    size = num_steps + horizon  # one more than needed, so that `num_steps` may be 0
    padded = np.full((size, values.shape[1]), np.nan, np.float32)
    first, stop = max(start, 0), min(start + size, len(values))
    if first < stop:
        padded[first - start : stop - start] = values[first:stop]
    return sliding_window_view(padded, horizon, axis=0)[:num_steps]
