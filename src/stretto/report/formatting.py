"""Amounts: figures as people read them, for pages."""

import math

from stretto.plan.units import format_loss as short_loss
from stretto.plan.units import format_seconds as short_seconds


def format_count(value: float) -> str:
    """A whole number with its thousands, or in millions and more."""
    if not math.isfinite(value):
        return "-"
    for bound, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= bound:
            return f"{value / bound:,.3g} {word}"
    return f"{value:,.0f}"


def pluralize(value: int, word: str) -> str:
    """A number of things: `1 step`, `2 steps`."""
    return f"{value:,} {word}{'' if value == 1 else 's'}"


def loss(value: float) -> str:
    """A loss, in digits that tell two runs apart."""
    return short_loss(value) if math.isfinite(value) else "-"


def format_percent(value: float) -> str:
    """A part of a whole in percent."""
    if not math.isfinite(value):
        return "-"
    return f"{value:.1%}" if 0 < abs(value) < 0.0995 else f"{value:.0%}"


def format_duration(value: float) -> str:
    """A time of any length: `820 ms`, `41.2 s`, `12 min 5 s`, `3 h 20 min`, `2 d 4 h`."""
    if not math.isfinite(value):
        return "-"
    if value < 100:
        return short_seconds(value) if value else "0 s"
    rounded = round(value)
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if rounded >= size:
            rest = rounded % size // part
            return f"{rounded // size} {unit} {rest} {smaller}" if rest else f"{rounded // size} {unit}"
    return f"{rounded} s"


def run_time_unit(value: float) -> tuple[str, float]:
    """The unit for an axis that goes up to some seconds, and how many seconds it has."""
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if value >= 3 * size:
            return unit, size
    return "seconds", 1.0


def step_time_unit(value: float) -> tuple[float, str]:
    """How many there are of the unit in a second, and the unit, for an axis that goes up to a step or a part of it."""
    return (1e3, "milliseconds") if value < 1 else (1.0, "seconds")


def format_time(text: str) -> str:
    """A time of day in UTC, from how it is kept: `2026-11-15 13:02 UTC`."""
    return f"{text[:16].replace('T', ' ')} UTC" if len(text) >= 16 else text
