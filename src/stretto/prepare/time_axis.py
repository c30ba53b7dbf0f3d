"""Steps: in which order the rows of a table stand, what tells its series apart, and when they repeat themselves."""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import groupby, pairwise
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.prepare.prepare_series import Timestamp, parse_timestamp
from stretto.prepare.record_parser import parse_number

Records = Sequence[Mapping[str, Any]]

_HOUR = 3600.0
_DAY = 24 * _HOUR
# Rows that come so many seconds apart may repeat themselves after so many rows: a minute, hour, day, week or year.
_PERIODS = (
    (1.0, 60),
    (60.0, 60),
    (5 * 60.0, 288),
    (10 * 60.0, 144),
    (15 * 60.0, 96),
    (30 * 60.0, 48),
    (_HOUR, 24),
    (2 * _HOUR, 12),
    (3 * _HOUR, 8),
    (4 * _HOUR, 6),
    (6 * _HOUR, 4),
    (_DAY, 7),
    (7 * _DAY, 52),
    (30.4 * _DAY, 12),
    (91.3 * _DAY, 4),
)


def parse_timestamps(records: Records, time: str, is_csv: bool) -> list[Timestamp]:
    """Return the times of rows that have one."""
    found = (parse_timestamp(record.get(time), is_csv) for record in records)
    return [timestamp for timestamp in found if timestamp is not None]


def is_decreasing_anywhere(times: Sequence[Timestamp]) -> bool:
    """Does a time come before the one above it?"""
    try:
        return any(after < before for before, after in pairwise(times))  # type: ignore[operator]
    except TypeError:
        return True


def has_many_repeats(times: Sequence[Timestamp]) -> bool:
    """Does more than every third row have the time of the one above it?"""
    return sum(before == after for before, after in pairwise(times)) > len(times) / 3


def is_row_counter(records: Records, name: str, is_csv: bool) -> bool:
    """Does a column only count its rows?"""
    numbers = [parse_number(record.get(name), is_csv) for record in records]
    return len(numbers) > 2 and all(
        after is not None and before is not None and after - before == 1 for before, after in pairwise(numbers)
    )


def is_grouped(records: Records, by: str) -> bool:
    """Do rows with the same value in a column stand together?"""
    runs = [value for value, _ in groupby(str(record.get(by)) for record in records)]
    return len(runs) == len(set(runs))


def median_interval(times: Sequence[Timestamp]) -> float | None:
    """Return how many seconds lie between two rows, where their times are dates."""
    gaps = [
        (after - before).total_seconds()
        for before, after in pairwise(times)
        if isinstance(before, datetime) and isinstance(after, datetime) and _comparable(before, after)
    ]
    gaps = [gap for gap in gaps if gap > 0]
    return median(gaps) if gaps else None


def _comparable(before: datetime, after: datetime) -> bool:
    return (before.tzinfo is None) == (after.tzinfo is None)


def infer_period(seconds: float | None, values: NDArray[np.float64]) -> int:
    """Return after how many rows values `[rows, channels]` repeat themselves: 0 if not better than the last value does.

    What rows so far apart may repeat after is known; the values say whether they do.
    """
    if seconds is None:
        return 0
    near = [period for apart, period in _PERIODS if abs(seconds / apart - 1) < 0.1]
    if not near or len(values) < 3 * near[0]:
        return 0
    period = near[0]
    ahead = range(1, period + 1, max(1, period // 8))
    last = np.mean([_square_error(values, steps) for steps in ahead])
    again = _square_error(values, period)
    return period if math.isfinite(again) and again < last else 0


def _square_error(values: NDArray[np.float64], steps: int) -> float:
    """How wrong it is to say the value of so many rows before, in units of each channel's own spread."""
    spread = np.nanvar(values, axis=0)
    spread[~(spread > 0)] = 1.0
    errors = (values[steps:] - values[:-steps]) ** 2 / spread
    return float(np.nanmean(errors)) if np.isfinite(errors).any() else math.inf
