"""Time formats: recognize text that is a date or a time, find how it is written, and parse it."""

import re
from collections.abc import Sequence
from datetime import datetime

from stretto.base.errors import DataError

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DATE = "|".join(
    (
        r"\d{1,4}([-/.])\d{1,2}(?:\1\d{1,4})?",  # 1949-01, 01/03/2012, 01.01.2009
        r"\d{4}[- ]?[qwm]\d{1,2}",  # 1960Q1, 2012-W05
        r"q\d[- /]?\d{4}",  # Q1 1960
        rf"\d{{1,2}}[-. /]*{_MONTH}[-., /]*\d{{2,4}}",  # 3 Jan 2012
        rf"{_MONTH}[-., /]*(?:\d{{1,2}},?[- /])?\d{{2,4}}",  # Jan-62, January 3, 2012
        rf"\d{{4}}[- ]?{_MONTH}",  # 1962 Jan
    )
)
_CLOCK = r"\d{1,2}[:.]\d{2}(?:[:.]\d{2}(?:[.,]\d+)?)? ?(?:[ap]\.?m\.?)? ?(?:z|utc|gmt|[-+]\d{2}:?\d{2})?"
_TIME = re.compile(rf"(?:{_DATE})(?:[t, ]+{_CLOCK})?|{_CLOCK}", re.IGNORECASE)
# 31.12.2025 14:00, 12/31/2025 2:00:00 PM, 2025/12/31: three numbers and, after a gap, a clock.
_NUMERIC = re.compile(
    r"(\d{1,4})([-/.])\d{1,2}\2(\d{1,4})(?:(t|, ?| )\d{1,2}:\d{2}(:\d{2})?(\.\d{1,6})?(?:( ?)([ap]m))?)?", re.IGNORECASE
)


def parse_time(text: str, time_format: str | None = None) -> datetime | None:
    """Return the time in a text written as `time_format` says (None: ISO 8601); None if it is not one."""
    try:
        return datetime.fromisoformat(text) if time_format is None else datetime.strptime(text.strip(), time_format)
    except ValueError:
        return None


def find_time_formats(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the formats of dates in numbers in which all texts can be read; two if day and month can't be told apart.

    Where points separate the numbers, the day is first. Otherwise, a number above 12 tells which one is the day.
    """
    match = _NUMERIC.fullmatch(texts[0].strip()) if texts else None
    if match is None:
        return ()
    first, separator, last, gap, seconds, fraction, space, half = match.groups()
    orders = ["%Y %m %d"] if len(first) == 4 else ["%d %m %Y"] if separator == "." else ["%d %m %Y", "%m %d %Y"]
    if len(first) < 4 and len(last) < 4:  # 01/02/03 could be anything
        return ()
    clock = f"{gap}{'%I' if half else '%H'}:%M" if gap else ""
    clock += (":%S" if seconds else "") + (".%f" if fraction else "") + (f"{space}%p" if half else "")
    formats = [order.replace(" ", separator) + clock for order in orders]
    return tuple(known for known in formats if all(parse_time(text, known) is not None for text in texts))


def check_time_format(time_format: str) -> None:
    """Raise DataError if a format is not one of `strptime`."""
    moment = datetime(2025, 1, 31, 12)
    try:
        if "%" not in time_format:
            raise ValueError("it has no % directive")
        datetime.strptime(moment.strftime(time_format), time_format)
    except (ValueError, re.error) as error:
        problem = f"time_format={time_format!r} is not valid ({error})"
        raise DataError(f"{problem}; use directives of Python's strptime, such as '%d.%m.%Y %H:%M'") from None


def ambiguous_format(path: object, name: str, example: object, formats: Sequence[str]) -> str:
    """Return the message for dates whose day and month can't be told apart."""
    choices = " or ".join(f"time_format={choice!r}" for choice in formats)
    return f"{path}: in the dates of {name!r}, such as {example}, the day or the month could be first; set {choices}"


def looks_like_time(text: str) -> bool:
    """Return whether a text is a date or a time in one of the usual formats; some numbers, such as 1.5, pass too."""
    return parse_time(text) is not None or _TIME.fullmatch(text.strip()) is not None
