"""Formats and units of the numbers on a page."""

import math

from stretto.base.units import format_loss


def format_count(value: float) -> str:
    """Format a count with thousands separators, or from a million on as `1.26M`, `3.5B`, `2T`."""
    if not math.isfinite(value):
        return "-"
    for bound, size, unit in ((0.9995e12, 1e12, "T"), (0.9995e9, 1e9, "B"), (1e6, 1e6, "M")):
        if value >= bound:  # 999.5M is written as 1B, since `.3g` would print 1e+03M
            return f"{value / size:,.3g}{unit}"
    return f"{value:,.0f}"


def format_finite_loss(value: float) -> str:
    """Format a loss, or `-` if it is not finite."""
    return format_loss(value) if math.isfinite(value) else "-"


def format_percent(value: float) -> str:
    """Format a fraction in percent, with one decimal below 10%."""
    if not math.isfinite(value):
        return "-"
    if 0 < value < 0.0005:
        return "<0.1%"
    return f"{value:.1%}" if 0 < abs(value) < 0.0995 else f"{value:.0%}"  # from 9.95% on, `.1%` would print 10.0%


def run_time_unit(seconds: float) -> tuple[float, str]:
    """Return the factor from seconds to the unit of an axis over a run of this length, and the unit's name."""
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 3 * size:  # fewer than three units would be too coarse
            return 1 / size, unit
    return 1.0, "seconds"


def step_time_unit(seconds: float) -> tuple[float, str]:
    """Return the factor from seconds to the unit of an axis over a step of this length, and the unit's name."""
    return (1e3, "milliseconds") if seconds < 1 else (1.0, "seconds")


def format_time(text: str) -> str:
    """Format a UTC time in ISO 8601 as `2026-11-15 13:02 UTC`; return shorter text unchanged."""
    return f"{text[:16].replace('T', ' ')} UTC" if len(text) >= 16 else text
