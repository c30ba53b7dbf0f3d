"""ExtendedSeries: a series and the time steps to forecast, with what is known of them ahead of time.

           known values        to forecast
load       |------------------|                    the last value decides where the forecast starts
price      |------------------|----------|         known-future: the data has rows past the last load
size       |------------------|----------|         static: its value is repeated
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import DataError
from stretto.windows.forecast import ForecastTransform, Values


@dataclass(frozen=True)
class ExtendedSeries:
    """The values of a series `[time, channels]`, followed by the time steps to forecast; NaN where not known."""

    values: Values
    num_known: int  # time steps before those to forecast


def extend_series(
    values: NDArray[Any], transform: ForecastTransform, steps: int, name: str, channels: Sequence[str]
) -> ExtendedSeries:
    """Return a series with as many more time steps as whole horizons cover `steps`; `name` is for messages.

    With known-future channels, the rows after the last known value hold the known future.
    """
    num_known = transform.count_known(values)
    if not num_known:
        raise DataError(f"{name} has no values to forecast from; use a series that has some")
    if num_known < transform.season:
        raise DataError(f"{name} has length {num_known}, less than data.season={transform.season}; use a longer one")
    num_added = -(-steps // transform.horizon) * transform.horizon
    added = np.full((num_added, values.shape[1]), np.nan, np.float32)
    if transform.static:
        added[:, list(transform.static)] = values[num_known - 1, list(transform.static)]
    if transform.known_future:
        known = list(transform.known_future)
        future = values[num_known : num_known + num_added, known]
        is_missing = np.isnan(future).any(axis=1)
        num_complete = int(is_missing.argmax()) if is_missing.any() else len(future)
        if num_complete < num_added:
            names = ", ".join(channels[channel] for channel in known)
            others = ", ".join(channels[channel] for channel in transform.unknown_numbers)
            raise DataError(
                f"{name} has {names} for {num_complete} of the {num_added} time steps after the last value of "
                f"{others}; add rows with the known values, and leave {others} empty"
            )
        added[:, known] = future
    return ExtendedSeries(np.concatenate([values[:num_known].astype(np.float32), added]), num_known)
