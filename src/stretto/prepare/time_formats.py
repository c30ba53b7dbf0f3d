"""Time formats: recognize text that is a date or a time, even in a format that can't be parsed."""

import re
from datetime import datetime

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


def parse_time(text: str) -> datetime | None:
    """Return the time in an ISO 8601 string such as 2025-01-31T12:00:00; None if it is not one."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def looks_like_time(text: str) -> bool:
    """Return whether a text is a date or a time in one of the usual formats; some numbers, such as 1.5, pass too."""
    return parse_time(text) is not None or _TIME.fullmatch(text.strip()) is not None
