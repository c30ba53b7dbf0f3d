"""Units: times, sizes and losses as people read them; `-` for what nobody knows."""

import math


def format_seconds(value: float) -> str:
    """A time with the unit that suits it."""
    if math.isnan(value):
        return "-"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def format_duration(value: float) -> str:
    """A longer time with the unit that suits it."""
    for unit, bound in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if value >= bound:
            return f"{value / bound:.3g} {unit}{'s' * (value != bound)}"
    return format_seconds(value)


def format_bytes(value: float) -> str:
    """Bytes with the unit that suits them."""
    if math.isnan(value):
        return "-"
    for unit, bound in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= bound:
            return f"{value / bound:.3g} {unit}"
    return f"{value / 1e3:.3g} kB"


def format_loss(value: float) -> str:
    """A loss, in digits that tell two runs apart."""
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3e}"
