"""Baseline: the losses of a naive forecast, which repeats the last season or, without a season, the last value."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stretto.base.units import pluralize
from stretto.blocks.losses import Loss, QuantileLoss
from stretto.windows.items import SlidingWindows

# Losses are estimated from at least this many windows, or from all if there are fewer.
_MIN_WINDOWS = 2000
_WINDOWS_PER_READ = 128


@dataclass(frozen=True)
class Baseline:
    """The losses, on scaled values, of a forecast that repeats the last `season` values, or the last one."""

    season: int  # 0: the last value is repeated
    squared_error: float  # the mean, as with `model.loss = "mse"`, the default
    quantile_loss: float  # as with `model.loss = "quantile"` and the default quantiles

    @classmethod
    def of(cls, windows: SlidingWindows) -> "Baseline":
        """Return the losses on windows that are sampled evenly."""
        errors, loss = naive_errors(windows), QuantileLoss()
        return cls(
            season=windows.forecast.season,
            squared_error=float(errors.double().square().nanmean()),
            quantile_loss=mean_loss(loss, errors, len(loss.quantiles)),
        )

    def __str__(self) -> str:
        return f"{naive_name(self.season)} has squared error {self.squared_error:.4f}"


def naive_name(season: int) -> str:
    """Return a naive forecast in words: `repeating the last 24 time steps`."""
    return f"repeating the last {pluralize(season, 'time step') if season else 'value'}"


def mean_loss(loss: Loss, errors: Tensor, num_outputs: int) -> float:
    """Return the loss of outputs that miss their targets by `errors`; all quantiles are the same number."""
    result = loss(torch.zeros(*errors.shape[:-1], errors.shape[-1] * num_outputs, dtype=errors.dtype), errors)
    return float(result.total / result.count.clamp(min=1))


def naive_errors(windows: SlidingWindows) -> Tensor:
    """Return the errors `[windows, horizon * targets]` of repeating the last season or value; NaN where missing."""
    sizes = windows.shard_sizes
    stride = max(1, sum(sizes) // _MIN_WINDOWS)
    row_ids = [(shard, row) for shard, size in enumerate(sizes) for row in range(0, size, stride)]
    forecast, last = windows.forecast, windows.context - 1
    errors = []
    for start in range(0, len(row_ids), _WINDOWS_PER_READ):
        for _, _, values in windows.read_windows(row_ids[start : start + _WINDOWS_PER_READ]):
            targets = forecast.targets(values, last, last + 1)[0]  # with a season, these are the errors
            if not forecast.season:
                # The first inputs are the channels; a missing one is 0, the mean.
                channels = forecast.inputs(values, last, last + 1)[0, list(forecast.target_channels)]
                targets = targets - np.tile(channels, forecast.horizon)
            errors.append(targets)
    return torch.from_numpy(np.stack(errors))
