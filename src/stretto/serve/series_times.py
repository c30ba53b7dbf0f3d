"""The times of a file's series, and those of the time steps after them, for forecasts."""

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from itertools import groupby, pairwise
from pathlib import Path

from stretto.prepare.downloads import localize
from stretto.prepare.prepare_series import Timestamp, parse_timestamp
from stretto.prepare.records import cut_records, list_paths, read_rows
from stretto.store.sequences import Origin

_MAX_GAPS = 200  # of the last times, from which the interval is found
_MIN_REGULAR = 0.95  # this fraction of the gaps must be equal: a clock may change, but working days are not regular


def read_series_times(file: Path | str, origin: Origin, by: str | None) -> Iterator[list[Timestamp]]:
    """Yield the times of each series in a file that was prepared like the run's; nothing if it has none."""
    if origin.time is None:
        return
    by, fields = by or origin.by, [name for name in (origin.time, by or origin.by) if name is not None]
    for part in cut_records(list_paths(localize(file)), part_bytes=None):
        records = (row.record for row in read_rows(part, fields))
        for _, rows in groupby(records, key=lambda record: None if by is None else record.get(by)):
            times = [
                parse_timestamp(record.get(origin.time), part.format == "csv", origin.time_format) for record in rows
            ]
            yield [time for time in times if time is not None]


def times_after(times: Sequence[Timestamp], start: int, steps: int) -> list[Timestamp]:
    """Return the times of the time steps from `start` on: known ones, then those at the same interval.

    The result is empty if there are no times, or no interval: steps of weekdays or months differ in length, and times
    without hours may repeat.
    """
    known = list(times[start : start + steps])
    if len(known) == steps or not times:
        return known
    recent = times[max(0, start - _MAX_GAPS) : start + steps]
    gaps = Counter(_gap(before, after) for before, after in pairwise(recent))
    if not gaps:
        return []
    (gap, count) = gaps.most_common(1)[0]
    if not gap or count < _MIN_REGULAR * gaps.total():
        return []
    while len(known) < steps:
        last = known[-1] if known else times[start - 1]
        known.append(last + gap)  # type: ignore[operator]
    return known


def format_timestamp(time: Timestamp, time_format: str | None) -> str:
    """Return a time as it is written in the data: in its format, in ISO 8601, or as a number."""
    if isinstance(time, datetime):
        return time.isoformat(" ") if time_format is None else time.strftime(time_format)
    return f"{time:.15g}"


def _gap(before: Timestamp, after: Timestamp) -> timedelta | float | None:
    try:
        return after - before  # type: ignore[operator]
    except TypeError:  # a number and a date, or with and without a time zone
        return None
