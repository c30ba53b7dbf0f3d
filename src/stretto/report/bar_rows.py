"""Horizontal bars over a shared x axis: as HTML that fills the width of its container, or as an SVG file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stretto.report.chart import CHAR_WIDTH, StackedPart, box, heading, legend, percent, ticks
from stretto.report.markup import Html, join, tag
from stretto.report.page import read_style
from stretto.report.ticks import Scale, linear

_BAR_HEIGHT, _ROW_HEIGHT, _AXIS_HEIGHT = 20, 24, 40
# If a row's name and value have more characters than this, narrow screens show names and values above the bars.
_MAX_SIDE_CHARS = 20
# A bar's minimum width in pixels on narrow, medium and wide screens, and the class of labels that need such a screen.
_SCREENS = ((230.0, "on"), (500.0, "on mid"), (900.0, "on wide"))


class Box(NamedTuple):
    """A colored part of a bar. `start` and `stop` are fractions of the bar's width."""

    start: float
    stop: float
    css_class: str
    tooltip: str
    label: str = ""


class BarRow(NamedTuple):
    """A row: its name, the boxes of its bar, and a text beside the bar."""

    name: str
    boxes: Sequence[Box]
    value: str = ""


@dataclass(frozen=True)
class BarChart:
    """Rows of bars over a shared x axis."""

    title: str
    description: str  # for screen readers
    legend_entries: Sequence[tuple[str, str]]  # names and their color classes
    rows: Sequence[BarRow]
    x: Scale
    unit: str

    def to_html(self) -> Html:
        """Return the chart for a page. Positions are in percent of its width, so that text is not stretched."""
        cells = []
        for row in self.rows:
            bar = tag("svg", *_draw_bar(row.boxes, _SCREENS), height=_BAR_HEIGHT)
            cells += [tag("span", row.name), bar, tag("span", row.value, class_="unit")]
        num_chars = max((len(row.name) + len(row.value) for row in self.rows), default=0)
        # A legend of one entry would only repeat the title.
        entries = self.legend_entries if len(self.legend_entries) > 1 else ()
        axis = tag("svg", *self._axis(), height=_AXIS_HEIGHT, class_="axis")
        bars_class = "bars stacked" if num_chars > _MAX_SIDE_CHARS else "bars"
        bars = tag("div", *cells, axis, class_=bars_class, role="img", aria_label=f"{self.title}: {self.description}")
        return join(heading(self.title), legend((name, f"chip {css_class}") for name, css_class in entries), bars)

    def to_svg(self, width: float = 1000) -> str:
        """Return an SVG file's content: chart (without the rows' values) and style sheet. Positions are in pixels."""
        left = 18 + CHAR_WIDTH * max((len(row.name) for row in self.rows), default=0)
        bar_width, top = width - left - 20, 66
        bottom = top + _ROW_HEIGHT * len(self.rows)
        parts = [tag("style", read_style()), tag("text", self.title, x=10, y=22, class_="title")]
        x = 10.0
        for name, css_class in self.legend_entries:
            parts.append(tag("rect", x=x, y=37, width=11, height=11, class_=f"fill {css_class}"))
            parts.append(tag("text", name, x=x + 16, y=47))
            x += 30 + CHAR_WIDTH * len(name)
        for index, row in enumerate(self.rows):
            y, bar = top + _ROW_HEIGHT * index, _draw_bar(row.boxes, ((bar_width, "on"),))
            parts.append(tag("text", row.name, x=left - 8, y=y + 14, text_anchor="end"))
            parts.append(tag("svg", *bar, x=left, y=y, width=bar_width, height=_BAR_HEIGHT))
        parts.append(tag("svg", *self._axis(), x=left, y=bottom, width=bar_width, height=_AXIS_HEIGHT))
        height = bottom + _AXIS_HEIGHT
        xmlns, style, view_box = "http://www.w3.org/2000/svg", "background: var(--card)", f"0 0 {width:g} {height:g}"
        return tag("svg", *parts, xmlns=xmlns, width=width, height=height, viewBox=view_box, style=style) + "\n"

    def _axis(self) -> list[Html]:
        return [*ticks(self.x, 0), tag("text", self.unit, x="50%", y=34, text_anchor="middle", class_="tick")]


def stacked_bar_chart(
    title: str,
    unit: tuple[float, str],
    names: Sequence[str],
    parts: Sequence[StackedPart],
    format_value: Callable[[float], str],
    values: Sequence[str] = (),
) -> Html:
    """Return a chart with one stacked bar per name.

    `unit` is the factor from amounts to the unit of the x axis, and its name; `values` are texts shown beside the bars.
    """
    factor, unit_name = unit
    totals = [sum(part.amounts[index] for part in parts) for index in range(len(names))]
    x = linear(0.0, max(totals, default=0.0) * factor or 1.0, 8, is_tight=True)
    rows = []
    for index, name in enumerate(names):
        boxes, start = [], 0.0
        for part in parts:
            stop = start + part.amounts[index]
            tooltip = f"{name}, {part.name}: {format_value(part.amounts[index])}"
            boxes.append(Box(x.fraction(start * factor), x.fraction(stop * factor), part.css_class, tooltip))
            start = stop
        rows.append(BarRow(name, boxes, values[index] if values else ""))
    # The description is for screen readers, so it lists only the first few bars.
    first_totals = [f"{name} {format_value(total)}" for name, total in zip(names[:8], totals, strict=False)]
    entries = [(part.name, part.css_class) for part in parts]
    return BarChart(title, "; ".join(first_totals), entries, rows, x, unit_name).to_html()


def _draw_bar(boxes: Sequence[Box], screens: Sequence[tuple[float, str]]) -> list[Html]:
    """Return the boxes of a bar. A label gets the class of the narrowest screen where it fits into its box, if any."""
    drawn = [tag("rect", width="100%", height=_BAR_HEIGHT, class_="track")]
    for start, stop, css_class, tooltip, label in boxes:
        drawn.append(box(start, stop, 0, _BAR_HEIGHT, css_class, tooltip))
        needed_width = 5 + CHAR_WIDTH * len(label)
        text_class = next((name for width, name in screens if (stop - start) * width > needed_width), None)
        if label and text_class is not None:
            x = percent((start + stop) / 2)
            drawn.append(tag("text", label, x=x, y=14, text_anchor="middle", class_=text_class))
    return drawn
