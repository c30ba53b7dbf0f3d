"""choose_forecast: horizon, season and context of a first forecast, where the user has not set them."""

import math
from dataclasses import dataclass

from stretto.base.errors import DataError
from stretto.base.units import pluralize
from stretto.prepare.series_schema import SeriesSchema
from stretto.store.corpus import Corpus
from stretto.store.sequences import Sequences
from stretto.train.naive_forecast import Baseline
from stretto.windows.forecast import ForecastTransform
from stretto.windows.items import SlidingWindows


@dataclass(frozen=True)
class ForecastRequest:
    """What the user has set for a forecast. None: choose from the data; no targets: forecast all channels."""

    horizon: int | None
    season: int | None
    context: int | None
    targets: tuple[str, ...]


def choose_forecast(
    schema: SeriesSchema, train: Sequences, valid: Sequences | Corpus | None, request: ForecastRequest
) -> tuple[SlidingWindows, str | None]:
    """Return the windows of a forecast that fits the data, and why it has no season, unless that was requested."""
    store = min((store for store in (train, valid) if isinstance(store, Sequences)), key=lambda store: store.longest)
    num_available = store.longest  # steps of the longest series in train or in valid, whichever is shorter
    horizon = request.horizon or max(1, min(schema.period or 8, num_available // 4))
    # As many whole periods as cover the horizon: a forecast must know the values one season before its targets.
    whole_periods = schema.period * math.ceil(horizon / schema.period) if schema.period else 0
    season = whole_periods if request.season is None else request.season
    season = season if request.season or season + horizon <= num_available else 0
    default_context = min(max(4 * (season or whole_periods), 2 * horizon, 32), num_available - horizon, 1024)
    context = request.context or max(season, 1, default_context)
    if context + horizon > num_available:
        options = [("season", request.season), ("horizon", request.horizon), ("context", request.context)]
        given = ", ".join(f"{name}={value}" for name, value in options if value)
        raise DataError(
            f"{store.location}: a forecast{given and f' with {given}'} needs {context + horizon} time steps, but the "
            f"longest series has {num_available}; use {'smaller values' if given else 'longer series'}, or a different "
            "validation_fraction (validation_fraction=0: no validation data)"
        )

    def make_windows(season: int) -> SlidingWindows:
        forecast = ForecastTransform.from_sequences(
            train, horizon, season=season, targets=request.targets, masks=schema.has_missing
        )
        return SlidingWindows(train, forecast, context)

    if request.season is not None:
        return make_windows(season), None
    if not whole_periods:
        reason = "the time between rows suggests none" if schema.seconds else "the time between rows is not known"
        return make_windows(0), f"no season: {reason}; season=N sets it"
    if not 0 < season <= context:
        limit = f"the context is {context}" if season else f"the series have {num_available}"
        return make_windows(0), f"no season: it would need {whole_periods} time steps before the forecast, but {limit}"
    return _compare(make_windows(0), make_windows(season))


def _compare(without: SlidingWindows, seasonal: SlidingWindows) -> tuple[SlidingWindows, str | None]:
    """Return the windows whose naive forecast is better over the horizon, and why, if these are without a season."""
    last_value_error, seasonal_error = (Baseline.of(windows).squared_error for windows in (without, seasonal))
    if seasonal_error < last_value_error:
        return seasonal, None
    season, horizon = seasonal.forecast.season, pluralize(without.forecast.horizon, "time step")
    return without, (
        f"no season: over {horizon}, the last value predicts better (squared error {last_value_error:.4f}) than the "
        f"values {season} time steps before ({seasonal_error:.4f}); season={season} uses these anyway"
    )
