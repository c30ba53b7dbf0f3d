"""XY charts as inline SVG: lines, histograms and stacked columns.

A chart is drawn once and fills the width it is given. Text and grid lines are placed in percent of that width, so that
text is not stretched. Lines and columns are drawn in a nested viewport, which is stretched; stroke widths are not.

    y labels | plot: 0% .................. 100%
             |   viewport: 0 ............. 2000 units
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stretto.report.downsampled_series import Floats
from stretto.report.markup import Html, join, tag
from stretto.report.ticks import Scale, choose_scale, format_short, linear, tick_formatter

CHAR_WIDTH = 6.9  # the mean width of a character in pixels
_WIDTH, _HEIGHT = 2000, 1000  # of the viewport, in its own units (as in page.js); points are rounded to whole units
_SMALL, _LARGE = 170, 270  # heights of a plot in pixels
_TOP, _BOTTOM = 8, 42  # pixels above the plot, and below it for the x axis
_MAX_DOTS = 60  # with more points than this, a line has dots only at isolated points


@dataclass(frozen=True)
class Line:
    """A line of a chart, with a band from `low` to `high` if given: a minimum and maximum, or two quantiles."""

    name: str
    color: int  # index of a color class
    x: Sequence[Sequence[float]]  # for each x axis of the chart: the positions of the points
    y: Sequence[float]  # NaN leaves a gap
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    is_faint: bool = False
    has_dots: bool = False

    @property
    def css_class(self) -> str:
        return f"c{self.color}{' faint' if self.is_faint else ''}"


@dataclass(frozen=True)
class XAxis:
    """An x axis. A chart can have several, of which the page shows one at a time."""

    label: str
    end: float = 0.0  # the axis reaches at least this far
    css_class: str | None = None  # by which the page's buttons show or hide the axis
    column: str = "step"  # of a DownsampledSeries: the x values
    factor: float = 1.0  # converts the column's values to the unit of the axis
    is_integer: bool = True


class StackedPart(NamedTuple):
    """A part of every stacked bar or column of a chart, with one amount per bar or column."""

    name: str
    css_class: str
    amounts: Sequence[float] | Floats


STEP_AXIS = (XAxis("step"),)
# An event, drawn as a dotted line with a tooltip: its position on each x axis, and the tooltip's text.
Mark = tuple[Sequence[float], str]


def line_chart(
    title: str,
    lines: Sequence[Line],
    x_axes: Sequence[XAxis] = STEP_AXIS,
    *,
    unit: str = "",
    from_zero: bool = False,
    marks: Sequence[Mark] = (),
    is_large: bool = False,
    is_linear: bool = False,
) -> Html:
    """Return a chart with one view per x axis, all with the same lines. Lines without a finite value are left out.

    The y axis is logarithmic if values differ much, unless `is_linear`.
    """
    shown = [line for line in lines if any(map(math.isfinite, line.y))]
    if not shown:
        return join(heading(title), tag("p", "No finite value was logged."))
    height = _LARGE if is_large else _SMALL
    y = _y_scale(shown, from_zero, is_linear)
    views = []
    for index, axis in enumerate(x_axes):
        points = [point for line in shown for point in zip(line.x[index], line.y, strict=True)]
        positions = [position for position, value in points if math.isfinite(value)]
        start, end = min(0.0, *positions), max(axis.end, *positions)
        x = linear(start, end, 10 if is_large else 5, is_integer=axis.is_integer, is_tight=True)
        drawn = [_band(x, y, line, index) for line in shown if len(line.low)]
        drawn += [part for line in shown for part in _draw_line(x, y, line, index)]
        drawn_marks = [_draw_mark(x, xs[index], text, height) for xs, text in marks if x.low <= xs[index] <= x.high]
        view = (*_x_axis(x, axis.label, height), *drawn_marks, _viewport(height, drawn))
        x_range = f"{x.low:.12g} {x.high:.12g}"
        css_class, is_integer = axis.css_class, axis.is_integer
        views.append(tag("g", *view, class_=css_class, data_x=axis.label, data_range=x_range, data_integer=is_integer))
    description = "; ".join(_describe_line(line) for line in shown if not line.is_faint or len(shown) == 1)
    # page.js reads the data-* attributes to show the values under the pointer.
    plot_data = f"{y.low:.12g} {y.high:.12g} {int(y.is_log)} {_TOP} {_TOP + height}"
    return join(
        heading(title, unit),
        legend([(line.name, f"key {line.css_class}") for line in shown if line.name]),
        _plot(y, height, f"{title}. {description}", views, data_y=plot_data),
    )


def stacked_column_chart(title: str, unit: str, x_label: str, parts: Sequence[StackedPart], num_items: int) -> Html:
    """Return a chart of stacked columns.

    The x axis has `num_items` items; if that is more than there are columns, a column is the mean of several items.
    """
    num_columns = len(parts[0].amounts)
    totals = [sum(part.amounts[index] for part in parts) for index in range(num_columns)]
    y = linear(0.0, max(totals) or 1.0, 4)
    x = linear(0.0, float(num_items), 6, is_integer=True, is_tight=True)
    width = _WIDTH / num_columns
    gap = 1.0 if num_columns < 100 else 0.0  # gaps between many thin columns would be drawn unevenly
    bases = [0.0] * num_columns
    drawn = []
    for part in parts:
        path = []  # one path per part: hundreds of boxes, one per column, would make the page large
        for index, value in enumerate(part.amounts):
            low, high = _viewport_y(y, bases[index]), _viewport_y(y, bases[index] + value)
            path.append(f"M{index * width:.1f} {low}V{high}h{width - gap:.2f}V{low}z")
            bases[index] += value
        drawn.append(tag("path", d="".join(path), class_=f"fill {part.css_class}"))
    label = f"{title}, {num_columns} columns, at most {format_short(max(totals))} {unit}"
    entries = [(part.name, f"chip {part.css_class}") for part in parts] if len(parts) > 1 else []
    views = [*_x_axis(x, x_label, _SMALL), _viewport(_SMALL, drawn)]
    return join(heading(title, unit), legend(entries), _plot(y, _SMALL, label, views))


def heading(title: str, unit: str = "") -> Html:
    """Return a chart's title and the unit of its y axis, which would be hard to read if rotated beside the axis."""
    return tag("div", title, tag("span", unit, class_="unit") if unit else None, class_="title")


def legend(entries: Iterable[tuple[str, str]]) -> Html | None:
    """Return a legend of (name, CSS class of its color key) entries; None if there are none."""
    items = [tag("span", tag("i", class_=css_class), name) for name, css_class in entries]
    return tag("div", *items, class_="legend") if items else None


def box(start: float, stop: float, y: float, height: float, css_class: str, tooltip: str) -> Html:
    """Return a rectangle with a tooltip; `start` and `stop` are fractions of the width, `y` and `height` are pixels."""
    x, y, height = percent(start), round(y, 1), round(height, 1)
    width, css_class = percent(max(stop - start, 0)), f"fill {css_class}"
    return tag("rect", tag("title", tooltip), x=x, y=y, width=width, height=height, class_=css_class)


def percent(fraction: float) -> str:
    return f"{round(100 * fraction, 2):g}%"


def ticks(x: Scale, y: float) -> list[Html]:
    """Return the ticks of an x axis that is drawn at `y`. If there are many, narrow screens hide every other label."""
    parts = []
    format_tick = tick_formatter(x)
    for index, tick in enumerate(x.ticks):
        fraction, label = x.fraction(tick), format_tick(tick)
        # A long label centered at the right end would be clipped: end it 14 pixels to the right of the tick.
        is_at_edge = fraction > 0.97 and len(label) > 4
        css_class = "tick mid" if len(x.ticks) > 7 and index % 2 else "tick"
        parts += [
            tag("line", x1=percent(fraction), x2=percent(fraction), y1=y, y2=y + 4, class_="rule"),
            tag("text", label, x=percent(fraction), y=y + 17, dx=14 if is_at_edge else None,
                text_anchor="end" if is_at_edge else "middle", class_=css_class),
        ]  # fmt: skip
    return parts


def _y_scale(lines: Sequence[Line], from_zero: bool, is_linear: bool) -> Scale:
    values = [value for line in lines for value in line.y if math.isfinite(value)]
    for line in lines:
        values += _without_outliers(line.low) + _without_outliers(line.high)
    if is_linear:
        return linear(min(values), max(values), 4)
    return choose_scale(min(values), max(values), 4, from_zero=from_zero)


def _without_outliers(values: Sequence[float]) -> list[float]:
    """Drop non-finite values, the lowest 2% and the highest 2%: outliers must not flatten all other values."""
    finite = sorted(value for value in values if math.isfinite(value))
    num_dropped = len(finite) // 50
    return finite[num_dropped : len(finite) - num_dropped]


def _plot(y: Scale, height: float, label: str, views: Sequence[Html], **data: str) -> Html:
    """Return the y axis in an SVG of fixed width, and beside it the plot, which takes the rest of the width."""
    format_tick = tick_formatter(y)
    width = 14 + CHAR_WIDTH * max(len(format_tick(tick)) for tick in y.ticks)
    labels, grid = [], []
    for tick in y.ticks:
        tick_y = round(_TOP + height * (1 - y.fraction(tick)), 1)
        labels.append(
            tag("text", format_tick(tick), x=round(width - 6), y=tick_y + 4, text_anchor="end", class_="tick")
        )
        grid.append(tag("line", x1=0, x2="100%", y1=tick_y, y2=tick_y, class_="grid"))
    size = {"height": height + _TOP + _BOTTOM}
    return tag(
        "div",
        tag("svg", *labels, width=round(width), **size, aria_hidden="true"),
        tag("svg", *grid, *views, **size, role="img", aria_label=label, **data),
        class_="plot",
    )


def _x_axis(x: Scale, label: str, height: float) -> list[Html]:
    bottom = _TOP + height
    return [
        *ticks(x, bottom),
        tag("line", x1=0, x2="100%", y1=bottom, y2=bottom, class_="rule"),
        tag("text", label, x="50%", y=bottom + 36, text_anchor="middle", class_="tick"),
    ]


def _viewport(height: float, drawn: Sequence[Html]) -> Html:
    view, fit = f"0 0 {_WIDTH} {_HEIGHT}", "none"
    return tag("svg", *drawn, y=_TOP, width="100%", height=height, viewBox=view, preserveAspectRatio=fit, class_="data")


def _draw_mark(x: Scale, position: float, tooltip: str, height: float) -> Html:
    mark_x = percent(x.fraction(position))
    return tag("line", tag("title", tooltip), x1=mark_x, x2=mark_x, y1=_TOP, y2=_TOP + height, class_="mark")


def _viewport_x(x: Scale, value: float) -> int:
    return round(_WIDTH * x.fraction(value))


def _viewport_y(y: Scale, value: float) -> int:
    # An outlier is drawn just outside the plot, however far away it is.
    return round(_HEIGHT * (1 - min(max(y.fraction(value), -0.02), 1.02)))


def _band(x: Scale, y: Scale, line: Line, axis_index: int) -> Html:
    finite = [
        (_viewport_x(x, position), low, high)
        for position, low, high in zip(line.x[axis_index], line.low, line.high, strict=True)
        if math.isfinite(low) and math.isfinite(high)
    ]
    upper = [f"{position},{_viewport_y(y, high)}" for position, _, high in finite]
    lower = [f"{position},{_viewport_y(y, low)}" for position, low, _ in reversed(finite)]
    return tag("polygon", points=" ".join(upper + lower), class_=f"band c{line.color}")


def _draw_line(x: Scale, y: Scale, line: Line, axis_index: int) -> list[Html]:
    """Return polylines between gaps, and dots at isolated points or, with `has_dots`, at all points of a short line."""
    segments: list[list[tuple[int, int]]] = [[]]
    for position, value in zip(line.x[axis_index], line.y, strict=True):
        if math.isfinite(value):
            segments[-1].append((_viewport_x(x, position), _viewport_y(y, value)))
        elif segments[-1]:
            segments.append([])
    parts = [
        tag("polyline", points=" ".join(f"{px},{py}" for px, py in points), class_=f"line {line.css_class}",
            data_name=line.name or None)
        for points in segments
        if len(points) > 1
    ]  # fmt: skip
    is_short = sum(map(len, segments)) <= _MAX_DOTS
    # A dot is a zero-length line with round caps: in the stretched viewport, a circle would become an ellipse.
    dots = [point for points in segments if len(points) == 1 or (line.has_dots and is_short) for point in points]
    if dots:
        path = "".join(f"M{px} {py}h0" for px, py in dots)
        parts.append(tag("path", d=path, class_=f"dot {line.css_class}{'' if is_short else ' small'}"))
    return parts


def _describe_line(line: Line) -> str:
    finite = [value for value in line.y if math.isfinite(value)]
    name = f"{line.name}: " if line.name else ""
    first, last, low, high = map(format_short, (finite[0], finite[-1], min(finite), max(finite)))
    return f"{name}from {first} to {last}, minimum {low}, maximum {high}"
