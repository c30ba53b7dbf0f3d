"""Baseline: the losses of a naive forecast, which repeats the last season or, without a season, the last value."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stretto.base.units import pluralize
from stretto.blocks.losses import QuantileLoss
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
        # All quantiles are the same number.
        quantiles = loss(torch.zeros(*errors.shape, len(loss.quantiles)), errors)
        return cls(
            season=windows.forecast.season,
            squared_error=float(errors.double().square().nanmean()),
            quantile_loss=float(quantiles.total / quantiles.count.clamp(min=1)),
        )

    def __str__(self) -> str:
        repeated = pluralize(self.season, "time step") if self.season else "value"
        return f"repeating the last {repeated} has squared error {self.squared_error:.4f}"


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
