"""Formats times, sizes, counts and losses for people; unknown times and sizes (NaN) become `-`."""

import math


def format_seconds(value: float) -> str:
    """Format a number of seconds as `1.25 s`, or as milliseconds below 1 s."""
    if math.isnan(value):
        return "-"
    # From 999.5 ms on, `.3g` would print 1e+03 ms.
    return f"{value:.3g} s" if value >= 0.9995 else f"{value * 1e3:.3g} ms"


def format_duration(value: float) -> str:
    """Format a duration (`-` if infinite): `820 ms`, `41.2 s`, `12 min 5 s`, `3 h 20 min`, `2 d 4 h`."""
    if not math.isfinite(value):
        return "-"
    if value < 100:
        return format_seconds(value) if value else "0 s"
    seconds = round(value)
    units = (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1))
    unit, size, smaller_unit, smaller_size = next(entry for entry in units if seconds >= entry[1])
    remainder = seconds % size // smaller_size
    return f"{seconds // size} {unit} {remainder} {smaller_unit}" if remainder else f"{seconds // size} {unit}"


def format_bytes(value: float) -> str:
    """Format a number of bytes in kB, MB, GB or TB."""
    if math.isnan(value):
        return "-"
    for unit, bound in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= 0.9995 * bound:  # as in format_seconds
            return f"{value / bound:.3g} {unit}"
    return f"{value / 1e3:.3g} kB"


def pluralize(value: int, word: str) -> str:
    """Format a number of things: `1 step`, `2 steps`."""
    return f"{value:,} {word}{'' if value == 1 else 's'}"


def format_loss(value: float) -> str:
    """Format a loss with enough digits to tell two runs apart."""
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3e}"
