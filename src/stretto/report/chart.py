"""Charts as inline SVG: lines over steps, a row of bars, bars of parts. Colours and fonts are the page's own."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from stretto.report.markup import Html, tag
from stretto.report.ticks import Scale, choose_scale, format_short, linear, tick_formatter

NARROW, MIDDLE, WIDE = 440, 760, 1160
CHAR_WIDTH = 6.9  # about the width of a letter


@dataclass(frozen=True)
class Line:
    """One line of a chart: where it goes, and around it the least and the most of what it is the mean of."""

    name: str
    color: int
    x: Sequence[float]
    y: Sequence[float]  # NaN leaves a gap
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    is_faint: bool = False
    has_dots: bool = False


@dataclass(frozen=True)
class Axes:
    """What the axes of a chart say."""

    title: str
    x: str
    y: str
    from_zero: bool = False
    x_max: float | None = None  # where the x axis ends; where its last point is, if not given
    marks: Sequence[tuple[float, str]] = field(default=())  # places on the x axis, and what happened there
    is_integer: bool = False  # the x axis counts something


@dataclass(frozen=True)
class Frame:
    """The place that the data has within a chart."""

    left: float
    top: float
    right: float
    bottom: float
    x: Scale
    y: Scale

    def x_pixel(self, value: float) -> float:
        return round(self.left + (self.right - self.left) * self.x.fraction(value), 1)

    def y_pixel(self, value: float) -> float:
        place = min(max(self.y.fraction(value), -0.02), 1.02)
        return round(self.bottom - (self.bottom - self.top) * place, 1)


def line_chart(axes: Axes, lines: Sequence[Line], width: int = NARROW, height: int = 250) -> Html:
    """Return a chart of lines over one axis; lines without a finite value are left out."""
    shown = [line for line in lines if any(map(math.isfinite, line.y))]
    if not shown:
        return _empty_chart(axes, width, height)
    legend = [line for line in shown if line.name]
    rows = legend_rows([line.name for line in legend], width - 16)
    frame = _frame(axes, shown, width, height, (34 if not rows else 42) + 18 * len(rows))
    parts = [_grid(frame, axes, width, height), *_legend(legend, rows, 46)]
    parts += [_mark(frame, place, what) for place, what in axes.marks if frame.x.low <= place <= frame.x.high]
    parts += [_band(frame, line) for line in shown if len(line.low)]
    parts += [part for line in shown for part in _draw_line(frame, line)]
    x, y = frame.x, frame.y
    plot = (
        f"{frame.left:g} {frame.top:g} {frame.right:g} {frame.bottom:g} "
        f"{x.low:.12g} {x.high:.12g} {y.low:.12g} {y.high:.12g} {int(y.is_log)}"
    )
    counted = {"data_whole": ""} if axes.is_integer else {}
    label = f"{axes.title}. " + "; ".join(
        _describe_line(line) for line in shown if not line.is_faint or len(shown) == 1
    )
    return svg(width, height, label, *parts, class_="chart lines", data_plot=plot, data_x=axes.x, **counted)


def svg(width: float, height: float, label: str, *parts: Html, class_: str = "chart", **more: str) -> Html:
    """Return an SVG that is as wide as its place, with words for those who don't see it."""
    rect = f"0 0 {width:g} {height:g}"
    return tag(
        "svg", *parts, viewbox=rect, width=width, height=height, role="img", aria_label=label, class_=class_, **more
    )


def text(x: float, y: float, words: str, anchor: str | None = None, class_: str | None = None) -> Html:
    """Return some words at a place."""
    return tag("text", words, x=round(x, 1), y=round(y, 1), text_anchor=anchor, class_=class_)


def rect(x: float, y: float, width: float, height: float, class_: str, title: str | None = None) -> Html:
    """Return a box; a title is what it says when one points at it."""
    said = [] if title is None else [tag("title", title)]
    return tag(
        "rect",
        *said,
        x=round(x, 2),
        y=round(y, 2),
        width=round(max(width, 0), 2),
        height=round(height, 2),
        class_=class_,
    )


def legend_rows(names: Sequence[str], width: float) -> list[list[str]]:
    """Return the names of a legend, row by row, as many in each as there is room for."""
    rows: list[list[str]] = []
    used = width
    for name in names:
        needed = 30 + CHAR_WIDTH * len(name)
        if used + needed > width:
            rows.append([])
            used = 0.0
        rows[-1].append(name)
        used += needed
    return rows


def swatches(rows: Sequence[Sequence[str]], classes: Sequence[str], y: float, x: float = 10) -> list[Html]:
    """Return a legend of boxes, a class for each name."""
    parts: list[Html] = []
    number = 0
    for row in rows:
        at = x
        for name in row:
            parts += [rect(at, y - 9, 11, 11, classes[number]), text(at + 16, y, name)]
            at += 30 + CHAR_WIDTH * len(name)
            number += 1
        y += 18
    return parts


def histogram_chart(axes: Axes, edges: Sequence[float], counts: Sequence[float], x: Scale, width: int = NARROW) -> Html:
    """Return a histogram: a bar between each two edges."""
    height, unit = 250, axes.y
    y = linear(0.0, max(counts) or 1.0, 4)
    frame = Frame(_left_margin(y), 34, width - 14, height - 42, x, y)
    parts = [_grid(frame, axes, width, height)]
    for (low, high), count in zip(pairwise(edges), counts, strict=True):
        left, right, top = frame.x_pixel(low), frame.x_pixel(high), frame.y_pixel(count)
        said = f"{format_short(low)} to {format_short(high)}: {format_short(count)} {unit}"
        parts.append(rect(left + 0.5, top, right - left - 1, frame.bottom - top, "fill c0", said))
    parts += [_mark(frame, place, what) for place, what in axes.marks if x.low <= place <= x.high]
    label = f"{axes.title}: {format_short(sum(counts))} {unit} from {format_short(edges[0])} to {format_short(edges[-1])} {axes.x}"
    return svg(width, height, label, *parts)


def stacked_bar_chart(
    title: str,
    unit: str,
    names: Sequence[str],
    parts: Sequence[tuple[str, str, Sequence[float]]],
    format_value: Callable[[float], str],
    ends: Sequence[str] = (),
    width: int = NARROW,
) -> Html:
    """Return a row of boxes for each name: each part a name, a class, and a value for each row."""
    row, left = 24, min(14 + CHAR_WIDTH * max(map(len, names), default=0), width * 0.55)
    most_end = CHAR_WIDTH * max(map(len, ends), default=0)
    totals = [sum(values[index] for _, _, values in parts) for index in range(len(names))]
    x = linear(0.0, max(totals, default=0.0) or 1.0, 4 if width < 600 else 8, is_tight=True)
    legend = legend_rows([name for name, _, _ in parts], width - 16) if len(parts) > 1 else []
    top = (34 if not legend else 40) + 18 * len(legend)
    bottom = top + row * len(names)
    frame = Frame(left, top, width - 20 - most_end, bottom, x, linear(0, 1, 1))
    found = [text(8, 20, title, class_="title"), *swatches(legend, [class_ for _, class_, _ in parts], 46)]
    for tick in x.ticks:
        at = frame.x_pixel(tick)
        found += [
            tag("line", x1=at, x2=at, y1=top, y2=bottom, class_="grid"),
            text(at, bottom + 16, tick_formatter(x)(tick), "middle", "tick"),
        ]
    found.append(text((left + frame.right) / 2, bottom + 34, unit, "middle", "axis"))
    for index, name in enumerate(names):
        y, at = top + row * index, frame.left
        found.append(text(left - 8, y + 16, name, "end"))
        for what, class_, values in parts:
            size = frame.x_pixel(values[index]) - frame.left
            found.append(rect(at, y + 3, size, row - 6, class_, f"{name}, {what}: {format_value(values[index])}"))
            at += size
        if ends:
            found.append(text(at + 6, y + 16, ends[index], class_="tick"))
    words = "; ".join(f"{name} {format_value(total)}" for name, total in list(zip(names, totals, strict=True))[:8])
    return svg(width, bottom + 44, f"{title}: {words}", *found)


def stacked_column_chart(
    axes: Axes, parts: Sequence[tuple[str, str, Sequence[float]]], num_columns: int, width: int = NARROW
) -> Html:
    """Return a stack of boxes for each place of the x axis; where there are many, each column is the mean of some."""
    height = 250
    legend = legend_rows([name for name, _, _ in parts], width - 16) if len(parts) > 1 else []
    number = len(parts[0][2])
    totals = [sum(values[index] for _, _, values in parts) for index in range(number)]
    y = linear(0.0, max(totals) or 1.0, 4)
    x = linear(0.0, float(num_columns), 6 if width < 600 else 12, is_integer=True, is_tight=True)
    frame = Frame(_left_margin(y), (34 if not legend else 42) + 18 * len(legend), width - 14, height - 42, x, y)
    found = [_grid(frame, axes, width, height), *swatches(legend, [class_ for _, class_, _ in parts], 46)]
    size = (frame.right - frame.left) / number
    # Gaps between many thin columns would flicker.
    gap = 0.6 if size > 5 else 0.0
    under = [0.0] * number
    for _, class_, values in parts:
        # One path for all: hundreds of boxes would be most of the page.
        path = []
        for index, value in enumerate(values):
            low, high = frame.y_pixel(under[index]), frame.y_pixel(under[index] + value)
            path.append(f"M{frame.left + index * size:.1f} {low}V{high}h{size - gap:.2f}V{low}z")
            under[index] += value
        found.append(tag("path", d="".join(path), class_=class_))
    return svg(width, height, f"{axes.title}, {number} columns, at most {format_short(max(totals))} {axes.y}", *found)


def _frame(axes: Axes, lines: Sequence[Line], width: int, height: int, top: float) -> Frame:
    x = [value for line in lines for value, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
    y = [
        value
        for line in lines
        for value in (*line.y, *_without_outliers(line.low), *_without_outliers(line.high))
        if math.isfinite(value)
    ]
    scale = choose_scale(min(y), max(y), 4, from_zero=axes.from_zero)
    x_scale = linear(
        min(0.0, *x), max(*x, axes.x_max or 0.0), 5 if width < 600 else 10, is_integer=axes.is_integer, is_tight=True
    )
    return Frame(_left_margin(scale), top, width - 16, height - 42, x_scale, scale)


def _without_outliers(values: Sequence[float]) -> list[float]:
    """Values but for the outermost fiftieth on both sides: a few that stick out must not press all others flat."""
    there = sorted(value for value in values if math.isfinite(value))
    few = len(there) // 50
    return there[few : len(there) - few]


def _left_margin(scale: Scale) -> float:
    return 20 + CHAR_WIDTH * max(len(tick_formatter(scale)(tick)) for tick in scale.ticks)


def _grid(frame: Frame, axes: Axes, width: int, height: int) -> Html:
    # The unit of the y axis stands behind the title: turned by a quarter, few would read it.
    unit = [tag("tspan", f"  {axes.y}", class_="tick")] if axes.y else []
    parts = [tag("text", axes.title, *unit, x=8, y=20, class_="title")]
    say_y, say_x = tick_formatter(frame.y), tick_formatter(frame.x)
    for tick in frame.y.ticks:
        y = frame.y_pixel(tick)
        parts += [
            tag("line", x1=frame.left, x2=frame.right, y1=y, y2=y, class_="grid"),
            text(frame.left - 6, y + 4, say_y(tick), "end", "tick"),
        ]
    for tick in frame.x.ticks:
        x, words = frame.x_pixel(tick), say_x(tick)
        # What would stick out on the right is pulled in.
        at = min(x, width - 4 - CHAR_WIDTH * len(words) / 2)
        parts += [
            tag("line", x1=x, x2=x, y1=frame.bottom, y2=frame.bottom + 4, class_="rule"),
            text(at, frame.bottom + 17, words, "middle", "tick"),
        ]
    parts.append(tag("line", x1=frame.left, x2=frame.right, y1=frame.bottom, y2=frame.bottom, class_="rule"))
    parts.append(text((frame.left + frame.right) / 2, height - 6, axes.x, "middle", "axis"))
    return tag("g", *parts)


def _legend(lines: Sequence[Line], rows: Sequence[Sequence[str]], y: float) -> list[Html]:
    parts: list[Html] = []
    number = 0
    for row in rows:
        at = 10.0
        for name in row:
            parts.append(
                tag("line", x1=at, x2=at + 14, y1=y - 4, y2=y - 4, class_=f"stroke {_css_class(lines[number])}")
            )
            parts.append(text(at + 19, y, name))
            at += 30 + CHAR_WIDTH * len(name)
            number += 1
        y += 18
    return parts


def _mark(frame: Frame, place: float, what: str) -> Html:
    x = frame.x_pixel(place)
    return tag("line", tag("title", what), x1=x, x2=x, y1=frame.top, y2=frame.bottom, class_="mark")


def _band(frame: Frame, line: Line) -> Html:
    there = [
        (x, low, high)
        for x, low, high in zip(line.x, line.low, line.high, strict=True)
        if math.isfinite(low) and math.isfinite(high)
    ]
    over = [f"{frame.x_pixel(x):g},{frame.y_pixel(high):g}" for x, _, high in there]
    under = [f"{frame.x_pixel(x):g},{frame.y_pixel(low):g}" for x, low, _ in reversed(there)]
    return tag("polygon", points=" ".join(over + under), class_=f"band c{line.color}")


def _draw_line(frame: Frame, line: Line) -> list[Html]:
    """A polyline for each stretch without a gap, and dots where there are few points."""
    stretches: list[list[str]] = [[]]
    for x, y in zip(line.x, line.y, strict=True):
        if math.isfinite(y):
            stretches[-1].append(f"{frame.x_pixel(x):g},{frame.y_pixel(y):g}")
        elif stretches[-1]:
            stretches.append([])
    name, class_ = line.name or None, f"line {_css_class(line)}"
    parts = [
        tag("polyline", points=" ".join(points), class_=class_, data_name=name)
        for points in stretches
        if len(points) > 1
    ]
    number = sum(map(len, stretches))
    for points in stretches:
        for point in points if len(points) == 1 or (line.has_dots and number <= 60) else ():
            x_pixel, y_pixel = point.split(",")
            parts.append(
                tag("circle", cx=x_pixel, cy=y_pixel, r=3 if number <= 60 else 1.5, class_=f"dot {_css_class(line)}")
            )
    return parts


def _css_class(line: Line) -> str:
    return f"c{line.color}{' faint' if line.is_faint else ''}"


def _describe_line(line: Line) -> str:
    there = [value for value in line.y if math.isfinite(value)]
    name = f"{line.name}: " if line.name else ""
    return f"{name}from {format_short(there[0])} to {format_short(there[-1])}, least {format_short(min(there))}, most {format_short(max(there))}"


def _empty_chart(axes: Axes, width: int, height: int) -> Html:
    words = text(width / 2, height / 2, "no finite value was logged", "middle", "tick")
    return svg(width, height, f"{axes.title}: nothing to draw", text(8, 20, axes.title, class_="title"), words)
