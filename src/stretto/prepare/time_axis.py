"""Time axis of a table: the order of its rows, the interval between them, and the period that it suggests."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import groupby, pairwise
from statistics import median
from typing import Any

from stretto.prepare.prepare_series import Timestamp, parse_timestamp
from stretto.prepare.record_parser import parse_number

Records = Sequence[Mapping[str, Any]]

_DAY_SECONDS = 86_400.0
# The seconds between two rows, and the period in rows that they suggest: a minute, hour, day, week or year.
_PERIODS = (
    (1.0, 60),
    (60.0, 60),
    *((60.0 * minutes, 24 * 60 // minutes) for minutes in (5, 10, 15, 30, 60, 120, 180, 240, 360)),
    (_DAY_SECONDS, 7),
    (7 * _DAY_SECONDS, 52),
    (30.4 * _DAY_SECONDS, 12),  # months
    (91.3 * _DAY_SECONDS, 4),  # quarters
)


def parse_timestamps(records: Records, time: str, is_csv: bool, time_format: str | None = None) -> list[Timestamp]:
    """Return the times in the column `time`; rows without a valid time are left out."""
    timestamps = (parse_timestamp(record.get(time), is_csv, time_format) for record in records)
    return [timestamp for timestamp in timestamps if timestamp is not None]


def is_decreasing_anywhere(times: Sequence[Timestamp]) -> bool:
    """Return whether any time is earlier than the one before it, or can't be compared with it."""
    try:
        return any(after < before for before, after in pairwise(times))  # type: ignore[operator]
    except TypeError:
        return True


def has_many_repeats(times: Sequence[Timestamp]) -> bool:
    """Return whether more than a third of the times equal the one before; with two series sorted by time, half do."""
    return sum(before == after for before, after in pairwise(times)) > len(times) / 3


def is_row_counter(records: Records, name: str, is_csv: bool) -> bool:
    """Return whether a column only counts the rows, in steps of 1."""
    numbers = [parse_number(record.get(name), is_csv) for record in records]
    return len(numbers) > 2 and all(
        after is not None and before is not None and after - before == 1 for before, after in pairwise(numbers)
    )


def is_grouped(records: Records, by: str) -> bool:
    """Return whether all rows with the same value in column `by` are next to each other."""
    runs = [value for value, _ in groupby(str(record.get(by)) for record in records)]
    return len(runs) == len(set(runs))


def median_interval(times: Sequence[Timestamp]) -> float | None:
    """Return the median seconds from a datetime to the next one, if later; None if there is no such pair."""
    gaps = [
        (after - before).total_seconds()
        for before, after in pairwise(times)
        if isinstance(before, datetime) and isinstance(after, datetime)
        # A time with a time zone can't be compared with one without.
        if (before.tzinfo is None) == (after.tzinfo is None) and before < after
    ]
    return median(gaps) if gaps else None


def calendar_period(seconds: float | None, num_rows: int) -> int:
    """Return after how many rows a day, a week or so has passed, if a row comes every `seconds`.

    0 if the interval suggests no period, or there are fewer than three periods of rows.
    """
    if seconds is None:
        return 0
    # Within 10%, since months differ in length.
    period = next((period for interval, period in _PERIODS if abs(seconds / interval - 1) < 0.1), 0)
    return period if num_rows >= 3 * period else 0
