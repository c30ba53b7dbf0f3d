"""forecast_chart: known values and a forecast of one channel, with a band between its outer quantiles."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stretto.report.chart import Line, Mark, XAxis, line_chart
from stretto.report.formatting import format_percent
from stretto.report.markup import Html, tag
from stretto.report.page import figure, note

Column = Sequence[float]  # one value per time step; NaN where it is missing


@dataclass(frozen=True)
class ForecastCurve:
    """The known values of a channel from a time step on, and the forecast of some time steps, which may overlap."""

    channel: str
    known: Column
    known_start: int  # the index of the first known time step, like `start`
    start: int
    columns: Sequence[Column]  # the forecast, one per quantile
    quantiles: Sequence[float] = ()  # empty: the only column is the forecast

    @property
    def middle(self) -> int:
        """The index of the quantile that is closest to the median."""
        return min(range(len(self.columns)), key=lambda i: abs(self.quantiles[i] - 0.5)) if self.quantiles else 0

    def count_covered(self) -> tuple[int, int]:
        """Return how many known values lie between the outer quantiles, and how many were forecast."""
        known = self.known[self.start - self.known_start :]
        rows = [
            (value, low, high)
            for value, low, high in zip(known, self.columns[0], self.columns[-1], strict=False)
            if math.isfinite(value) and math.isfinite(low) and math.isfinite(high)
        ]
        return sum(low <= value <= high for value, low, high in rows), len(rows)


def forecast_chart(curve: ForecastCurve, title: str, *, marks_start: bool = False) -> Html:
    """Return a figure of known values and the forecast; with quantiles, the median in a band of the outer ones.

    With `marks_start`, the x axis counts from the start of the forecast, which is marked.
    """
    origin = curve.start if marks_start else curve.known_start
    first, forecast_first = curve.known_start - origin, curve.start - origin
    middle = curve.columns[curve.middle]
    known_steps = [float(step) for step in range(first, first + len(curve.known))]
    steps = [float(step) for step in range(forecast_first, forecast_first + len(middle))]
    band = (curve.columns[0], curve.columns[-1]) if len(curve.quantiles) > 1 else ((), ())
    lines = [
        Line("known", 0, [known_steps], curve.known, has_dots=len(curve.known) == 1),
        Line(_forecast_name(curve), 1, [steps], middle, *band, has_dots=True),
    ]
    label = "time step, from the first one to forecast" if marks_start else f"time step, from step {curve.known_start}"
    marks: list[Mark] = [([0.0], "the forecast starts here")] if marks_start else []
    chart = line_chart(title, lines, [XAxis(label)], marks=marks, is_large=True, is_linear=True)
    covered, count = curve.count_covered() if len(curve.quantiles) > 1 else (0, 0)
    if not count:
        return figure(chart, "full-width")
    low, high = curve.quantiles[0], curve.quantiles[-1]
    expected = format_percent(high - low)
    text = (
        f"{covered:,} of {count:,} known values ({format_percent(covered / count)}) are in the band; a right model has "
    )
    return tag("div", figure(chart, "full-width"), note(f"{text}{expected} of them there."))


def _forecast_name(curve: ForecastCurve) -> str:
    if not curve.quantiles:
        return "forecast"
    quantile = curve.quantiles[curve.middle]
    name = "median" if quantile == 0.5 else f"quantile {quantile}"
    if len(curve.quantiles) == 1:
        return name
    return f"{name}, in the band from quantile {curve.quantiles[0]} to {curve.quantiles[-1]}"
