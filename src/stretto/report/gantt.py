"""Gantt charts of one training step: a row per rank or stage, time from left to right."""

from collections.abc import Sequence
from typing import NamedTuple

from stretto.base.units import format_seconds, pluralize
from stretto.plan.actions import action_labels
from stretto.plan.timeline import Timeline
from stretto.plan.trace import Trace, TraceEvent
from stretto.report.bar_rows import BarChart, BarRow, Box
from stretto.report.formatting import step_time_unit
from stretto.report.ticks import linear

_CSS_CLASSES = {
    "data": "c4",
    "forward": "c0",
    "backward": "c1",
    "optimizer": "c2",
    "head": "c3",
    "head gradient": "c3",
    "embedding": "c3",
    "embedding gradient": "c3",
}
_MIN_FRACTION = 1 / 1400  # a bar shorter than this fraction of the axis is thinner than a pixel on a wide screen


class Bar(NamedTuple):
    """An activity in one row of the chart, drawn as a `Box`; `start` and `stop` are in seconds."""

    row: int
    kind: str
    label: str
    start: float
    stop: float


def bars_from_timeline(timeline: Timeline) -> list[Bar]:
    """Return one bar per action of a simulated step; each stage is a row."""
    label_of = action_labels(timed.action for timed in timeline.timed_actions)
    bars = []
    for timed in timeline.timed_actions:
        kind = TraceEvent.of(timed).category
        bars.append(Bar(timed.stage, kind, label_of(timed.action), timed.start, timed.stop))
    return bars


def stage_names(timeline: Timeline, row_name: str = "stage") -> list[str]:
    """Return the row names of a timeline; with spans instead of stages, `row_name` is `span`."""
    return [f"{row_name} {stage}" for stage in range(timeline.num_stages)]


def bars_from_trace(trace: Trace, max_ranks: int) -> tuple[list[str], list[Bar]]:
    """Return the row names and bars of a measured step; each of the first `max_ranks` ranks is a row."""
    label_of = action_labels(event.action for row in trace.ranks for event in row.events if event.action is not None)
    names, bars = [], []
    is_hybrid = len({row.stage for row in trace.ranks}) > 1 and len({row.replica for row in trace.ranks}) > 1
    for row_index, row in enumerate(trace.ranks[:max_ranks]):
        # With several replicas and several stages, a name has both: `rank 5 (1.2)` is replica 1, stage 2.
        names.append(f"rank {row.rank} ({row.replica}.{row.stage})" if is_hybrid else f"rank {row.rank}")
        for event in row.events:
            label = event.category if event.action is None else label_of(event.action)
            bars.append(Bar(row_index, event.category, label, event.start, event.stop))
    return names, bars


def gantt(title: str, names: Sequence[str], bars: Sequence[Bar], max_seconds: float | None = None) -> BarChart:
    """Return a chart with one row per name; bars of rows beyond the names are left out.

    `max_seconds` is the end of the time axis (default: the end of the last bar), so that several charts can share it.
    """
    end = max_seconds or max((bar.stop for bar in bars), default=0.0) or 1.0
    factor, unit = step_time_unit(end)
    boxes: list[list[Box]] = [[] for _ in names]
    for bar in _merge_thin_bars(bars, _MIN_FRACTION * end):
        if bar.row < len(names):
            duration, start = format_seconds(bar.stop - bar.start), format_seconds(bar.start)
            tooltip = f"{names[bar.row]}: {bar.label}, starts at {start}, takes {duration}"
            css_class = _CSS_CLASSES.get(bar.kind, "rest")
            boxes[bar.row].append(Box(bar.start / end, bar.stop / end, css_class, tooltip, bar.label))
    kinds = [kind for kind in _CSS_CLASSES if any(bar.kind == kind for bar in bars)]
    description = f"{pluralize(len(names), 'row')}, {format_seconds(end)} in total; {', '.join(kinds)}"
    legend_entries = [(kind, _CSS_CLASSES[kind]) for kind in kinds]
    rows = [BarRow(name, row_boxes) for name, row_boxes in zip(names, boxes, strict=True)]
    return BarChart(title, description, legend_entries, rows, linear(0.0, end * factor, 10, is_tight=True), unit)


def _merge_thin_bars(bars: Sequence[Bar], min_seconds: float) -> list[Bar]:
    """Merge bars too thin to be seen into the previous bar of their row, if it has the same kind and almost touches."""
    merged: list[Bar] = []
    for bar in sorted(bars, key=lambda bar: (bar.row, bar.start)):
        if merged and bar.stop - bar.start < min_seconds:
            previous = merged[-1]
            if (bar.row, bar.kind) == (previous.row, previous.kind) and bar.start - previous.stop < min_seconds:
                label = previous.label if previous.label.endswith(" ...") else f"{previous.label} ..."
                merged[-1] = previous._replace(stop=bar.stop, label=label)
                continue
        merged.append(bar)
    return merged
