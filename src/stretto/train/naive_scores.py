"""NaiveScores: the loss and errors of a naive forecast, in the units of the series, to compare a model with."""

from dataclasses import dataclass

import torch

from stretto.blocks.losses import QuantileLoss
from stretto.config.model import ModelConfig
from stretto.store.sequences import Channels
from stretto.train.build import build_loss
from stretto.train.naive_forecast import mean_loss, naive_errors, naive_name
from stretto.windows.items import SlidingWindows


@dataclass(frozen=True)
class NaiveScores:
    """The scores of a forecast that repeats the last `season` values, or the last one, on the windows of a model."""

    season: int  # 0: the last value is repeated
    loss: float | None  # on scaled values, as a run's validation loss; None if the loss is the user's own
    errors: dict[str, float]  # in units, by the names of `compute_metrics`

    @classmethod
    def of(cls, windows: SlidingWindows, model: ModelConfig) -> "NaiveScores":
        """Return the scores on all windows, or on an even sample of many, for a model's loss and quantiles."""
        forecast, scaled = windows.forecast, naive_errors(windows)
        channels = windows.sequences.fields.values
        assert isinstance(channels, Channels)
        names = [channels.names[index] for index in forecast.target_channels]
        # [windows, horizon * targets], and the targets of a time step are next to each other.
        in_units = (scaled.double() * torch.tensor(forecast.target_std).double()).reshape(-1, len(names))
        quantiles = model.predicted_quantiles
        errors = {}
        for name, error in zip(names, in_units.unbind(1), strict=True):
            if quantiles:
                errors[f"pinball loss of {name}"] = mean_loss(QuantileLoss(quantiles), error[:, None], len(quantiles))
            errors[f"mean absolute error of {name}"] = float(error.abs().nanmean())
        loss = None if model.has_own_loss else build_loss(model, forecast.task)
        return cls(forecast.season, None if loss is None else mean_loss(loss, scaled, len(quantiles) or 1), errors)

    @property
    def name(self) -> str:
        """The forecast in words: `repeating the last 24 time steps`."""
        return naive_name(self.season)

    def __str__(self) -> str:
        return f"{self.name}: " + ", ".join(f"{name} {value:,.4f}" for name, value in self.errors.items())
