"""Scales of chart axes: where their ticks are, and how the numbers at the ticks are formatted."""

import math
from collections.abc import Callable
from dataclasses import dataclass

# A number of at least the first value is written as a multiple of the second, followed by the third.
_UNITS = ((1e12, 1e12, "T"), (1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic axis from `low` to `high`, with its ticks."""

    low: float
    high: float
    is_log: bool
    ticks: tuple[float, ...]

    def fraction(self, value: float) -> float:
        """Return where a value is on the axis: 0 at its start, 1 at its end."""
        if self.is_log:
            return math.log(max(value, 1e-300) / self.low) / math.log(self.high / self.low)  # never log(0)
        return (value - self.low) / (self.high - self.low)


def linear(low: float, high: float, num_ticks: int, *, is_integer: bool = False, is_tight: bool = False) -> Scale:
    """Return a linear scale with about `num_ticks` ticks. It ends at ticks or, with `is_tight`, at `low` and `high`."""
    # An empty range would give a step of 0: widen it, but not below 0 for a value that is not negative.
    if high - low <= 1e-300:
        margin = abs(low) * 0.5 or 1.0
        low, high = (low - margin if low < 0 else max(0.0, low - margin)), high + margin
    step = _nice_step((high - low) / max(num_ticks, 1))
    step = max(1.0, float(round(step))) if is_integer else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)  # 1e-9 absorbs rounding errors
    ticks = [index * step for index in range(first, last + 1)]
    if is_tight:
        return Scale(low, high, False, tuple(tick for tick in ticks if low <= tick <= high * (1 + 1e-12)))
    return Scale(ticks[0], ticks[-1], False, tuple(ticks))


def logarithmic(low: float, high: float, num_ticks: int) -> Scale:
    """Return a logarithmic scale for values > 0; ticks are 1, 2 and 5 (or 1 and 3, or only 1) times powers of 10."""
    margin = max((high / low) ** 0.04, 1.1)  # 4% of the range on each side, but at least a factor of 1.1
    low, high = low / margin, high * margin
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ticks: list[float] = []
    for leading in ((1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**power for power in range(first, last + 1) for digit in leading]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= num_ticks + 2:
            break
    stride = -(-len(ticks) // (num_ticks + 2))  # more than 1 if even the powers of 10 are too many
    return Scale(low, high, True, tuple(ticks[::stride]))


def choose_scale(low: float, high: float, num_ticks: int, *, from_zero: bool = False) -> Scale:
    """Return a linear scale, or a logarithmic one if `high` is over 30 times `low` and 0 need not be shown."""
    if from_zero and low >= 0:
        return linear(0.0, high or 1.0, num_ticks)
    if low > 1e-30 and high / low > 30:
        return logarithmic(low, high, num_ticks)
    return linear(low, high, num_ticks)


def tick_formatter(scale: Scale) -> Callable[[float], str]:
    """Return a function that formats the ticks of a scale, with as many digits as it takes to tell them apart."""
    largest = max((abs(tick) for tick in scale.ticks), default=0.0)
    if scale.is_log:
        return _format_power if scale.high >= 1e6 or scale.low <= 1e-4 else format_short
    gap = min((b - a for a, b in zip(scale.ticks, scale.ticks[1:], strict=False)), default=largest)
    for bound, size, unit in _UNITS:
        if 1e15 > largest >= bound:
            decimals = _num_decimals(gap / size)
            return lambda tick: "0" if not tick else f"{tick / size:.{decimals}f}{unit}"
    if 0 < largest < 1e-3 or largest >= 1e15:
        power = math.floor(math.log10(largest))
        decimals = _num_decimals(gap / 10.0**power)
        return lambda tick: "0" if not tick else f"{tick / 10.0**power:.{decimals}f}e{power}"
    decimals = _num_decimals(gap)
    return lambda tick: f"{tick:,.{decimals}f}"


def format_short(value: float) -> str:
    """Format a number in few characters: 1,234 or 12.3k or 1.2e-5."""
    if abs(value) >= 1e15 or 0 < abs(value) < 1e-3:
        return _format_power(value, 2)
    for bound, size, unit in _UNITS:
        if abs(value) >= bound:
            return f"{value / size:.4g}{unit}"
    return f"{value:,.0f}" if value == round(value) else f"{value:.4g}"


def _format_power(value: float, digits: int = 0) -> str:
    """Format a number as a multiple of a power of ten: 1e6, 3e-5."""
    mantissa, _, power = f"{value:.{digits}e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"


def _nice_step(min_step: float) -> float:
    """Return the smallest step, of those that start with 1, 2, 2.5 or 5, that is at least `min_step`."""
    power = 10.0 ** math.floor(math.log10(min_step))
    return next(nice * power for nice in (1.0, 2.0, 2.5, 5.0, 10.0) if nice * power >= min_step * 0.9999)


def _num_decimals(gap: float) -> int:
    """Return the number of decimals that it takes to write the gap between two ticks."""
    if gap <= 0:
        return 0
    for decimals in range(8):
        scaled = gap * 10**decimals
        if abs(scaled - round(scaled)) < 1e-6 * scaled:
            return decimals
    return 8
