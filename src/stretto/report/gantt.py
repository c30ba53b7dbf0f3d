"""Gantt charts: what each rank or stage does within one step, one row each, time from left to right."""

from collections.abc import Sequence
from typing import NamedTuple

from stretto.plan.actions import ActionKind, action_labels
from stretto.plan.timeline import Timeline
from stretto.plan.units import format_seconds
from stretto.report.chart import CHAR_WIDTH, Frame, legend_rows, rect, svg, swatches, text
from stretto.report.formatting import step_time_unit
from stretto.report.markup import Html, tag
from stretto.report.ticks import linear, tick_formatter

_CLASSES = {
    "data": "fill c4",
    "forward": "fill c0",
    "backward": "fill c1",
    "all_reduce": "fill c3",
    "optimizer": "fill c2",
    "waiting": "fill idle",
    "other": "fill rest",
}
_ROW_HEIGHT = 26


class Bar(NamedTuple):
    """One activity of a row, with its start and stop in seconds."""

    row: int
    kind: str
    label: str
    start: float
    stop: float


def bars_from_timeline(timeline: Timeline) -> list[Bar]:
    """Return one bar per action; each stage is a row."""
    label_of = action_labels(timed.action for timed in timeline.timed_actions)
    return [
        Bar(
            timed.stage,
            "forward" if timed.action.kind is ActionKind.FORWARD else "backward",
            label_of(timed.action),
            timed.start,
            timed.stop,
        )
        for timed in timeline.timed_actions
    ]


def stage_names(timeline: Timeline) -> list[str]:
    """Return the row names of a timeline."""
    return [f"stage {stage}" for stage in range(timeline.num_stages)]


def gantt(title: str, names: Sequence[str], bars: Sequence[Bar], width: int, max_seconds: float | None = None) -> Html:
    """Return a chart with one row per name.

    `max_seconds` is the end of the time axis; charts that share it can be compared by eye. By default the axis ends
    with the last bar.
    """
    end = max_seconds or max((bar.stop for bar in bars), default=0.0) or 1.0
    size, unit = step_time_unit(end)
    x = linear(0.0, end * size, 4 if width < 600 else 10, is_tight=True)
    kinds = [kind for kind in _CLASSES if any(bar.kind == kind for bar in bars)]
    legend = legend_rows(kinds, width - 16)
    top = 40 + 18 * len(legend)
    bottom = top + _ROW_HEIGHT * len(names)
    left = 14 + CHAR_WIDTH * max(7, *(len(name) for name in names))
    frame = Frame(left, top, width - 16, bottom, x, linear(0, 1, 1))
    parts = [text(8, 20, title, class_="title"), *swatches(legend, [_CLASSES[kind] for kind in kinds], 46)]
    for row, name in enumerate(names):
        y = top + _ROW_HEIGHT * row
        parts += [text(left - 8, y + 17, name, "end"), rect(left, y + 2, frame.right - left, _ROW_HEIGHT - 4, "lane")]
    scale = (frame.right - left) / end
    for bar in _merge_thin_bars(bars, 0.7 / scale):
        if bar.row < len(names):
            parts += _draw_bar(bar, left, top, scale, names[bar.row])
    for tick in x.ticks:
        at = frame.x_pixel(tick)
        parts.append(tag("line", x1=at, x2=at, y1=bottom, y2=bottom + 4, class_="rule"))
        parts.append(text(at, bottom + 17, tick_formatter(x)(tick), "middle", "tick"))
    parts.append(text((left + frame.right) / 2, bottom + 34, unit, "middle", "axis"))
    label = f"{title}: {len(names)} rows, {format_seconds(end)} in total; {', '.join(kinds)}"
    return svg(width, bottom + 42, label, *parts)


def _draw_bar(bar: Bar, left: float, top: float, scale: float, name: str) -> list[Html]:
    x, y, width = left + bar.start * scale, top + _ROW_HEIGHT * bar.row + 2, (bar.stop - bar.start) * scale
    tooltip = f"{name}: {bar.label}, {format_seconds(bar.stop - bar.start)} from {format_seconds(bar.start)}"
    shapes = [rect(x, y, max(width - 0.6, 0.4), _ROW_HEIGHT - 4, _CLASSES.get(bar.kind, "fill rest"), tooltip)]
    if bar.kind != "waiting" and width > 5 + CHAR_WIDTH * len(bar.label):
        shapes.append(text(x + width / 2, y + 15, bar.label, "middle", "on"))
    return shapes


def _merge_thin_bars(bars: Sequence[Bar], min_seconds: float) -> list[Bar]:
    """Merge bars too thin to be seen into the bar before them, if both have the same kind."""
    merged: list[Bar] = []
    last_index: dict[int, int] = {}  # by row
    for bar in sorted(bars, key=lambda bar: (bar.row, bar.start)):
        index = last_index.get(bar.row)
        if index is not None and bar.stop - bar.start < min_seconds:
            before = merged[index]
            if bar.kind == before.kind and bar.start - before.stop < min_seconds:
                label = before.label if before.label.endswith(" ...") else f"{before.label} ..."
                merged[index] = before._replace(stop=bar.stop, label=label)
                continue
        last_index[bar.row] = len(merged)
        merged.append(bar)
    return merged
