"""Numbers as people read them on a page."""

import math

from stretto.plan.units import format_loss, format_seconds


def format_count(value: float) -> str:
    """Format a count with thousands separators, or in millions and more."""
    if not math.isfinite(value):
        return "-"
    for bound, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= bound:
            return f"{value / bound:,.3g} {word}"
    return f"{value:,.0f}"


def pluralize(value: int, word: str) -> str:
    """Format a number of things: `1 step`, `2 steps`."""
    return f"{value:,} {word}{'' if value == 1 else 's'}"


def format_finite_loss(value: float) -> str:
    """Format a loss, or `-` if it is not finite."""
    return format_loss(value) if math.isfinite(value) else "-"


def format_percent(value: float) -> str:
    """Format a fraction in percent, with one decimal below 10%."""
    if not math.isfinite(value):
        return "-"
    if 0 < value < 0.0005:
        return "<0.1%"
    return f"{value:.1%}" if 0 < abs(value) < 0.0995 else f"{value:.0%}"


def format_duration(value: float) -> str:
    """Format a duration of any length: `820 ms`, `41.2 s`, `12 min 5 s`, `3 h 20 min`, `2 d 4 h`."""
    if not math.isfinite(value):
        return "-"
    if value < 100:
        return format_seconds(value) if value else "0 s"
    seconds = round(value)
    for unit, size, smaller_unit, smaller_size in (
        ("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1),
    ):  # fmt: skip
        if seconds >= size:
            rest = seconds % size // smaller_size
            return f"{seconds // size} {unit} {rest} {smaller_unit}" if rest else f"{seconds // size} {unit}"
    return f"{seconds} s"


def run_time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit for an axis that reaches to `seconds`, and its length in seconds."""
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 3 * size:
            return unit, size
    return "seconds", 1.0


def step_time_unit(seconds: float) -> tuple[float, str]:
    """Return how many units one second has, and the unit, for an axis that reaches to the length of a step."""
    return (1e3, "milliseconds") if seconds < 1 else (1.0, "seconds")


def format_time(text: str) -> str:
    """Format an ISO time as `2026-11-15 13:02 UTC`."""
    return f"{text[:16].replace('T', ' ')} UTC" if len(text) >= 16 else text
