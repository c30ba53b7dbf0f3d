"""Step: one step as it was measured, rank by rank, and beside it as the plan had it."""

from collections.abc import Mapping, Sequence
from typing import Any

from stretto.base.errors import DataError
from stretto.config.layout import Layout
from stretto.plan.actions import Action, ActionKind, action_labels
from stretto.plan.schedule import stage_schedule
from stretto.plan.serialize import timeline_from_dict
from stretto.plan.simulator import simulate
from stretto.plan.timeline import Timeline
from stretto.plan.trace import Trace
from stretto.plan.units import format_seconds
from stretto.report.chart import stacked_bar_chart
from stretto.report.formatting import format_percent, step_time_unit
from stretto.report.gantt import Bar, bars_from_timeline, gantt, stage_names
from stretto.report.markup import Html
from stretto.report.page import figure, note, responsive, section
from stretto.report.plan_comparison import find_planned_layout
from stretto.report.record import Record

TRACE = "trace.json"
# What is not known of a plan's step but its stages' time: a backward is about twice its forward.
_BACKWARD_FRACTION = 2 / 3
# More than these are a smear, and say no more.
_MAX_ROWS = 32


def step_section(record: Record) -> Html:
    """Return the measured timeline, the simulated one, and what the mean step was spent on."""
    parts: list[Html | None] = []
    trace, why = _read_trace(record)
    simulated, how = _planned_timeline(record)
    ends = [timeline.seconds for timeline in (simulated,) if timeline] + [
        _trace_seconds(found) for found in (trace,) if found
    ]
    max_seconds = max(ends, default=None)
    if trace is None:
        parts.append(note(why))
    else:
        names, bars = _bars_from_trace(trace)
        parts += [
            note(_explain(trace)),
            _gantt_figure(f"Step {trace.step:,} as it was measured", names, bars, max_seconds),
        ]
    if simulated is not None:
        names = stage_names(simulated)[:_MAX_ROWS]
        parts += [
            _gantt_figure("A step of one replica as it was planned", names, bars_from_timeline(simulated), max_seconds),
            note(how),
        ]
    if record.seconds:
        parts.append(figure(responsive(lambda width: _parts_chart(record, width)), class_="whole"))
    return section("step", "One step", *parts)


def _gantt_figure(title: str, names: Sequence[str], bars: Sequence[Bar], max_seconds: float | None) -> Html:
    return figure(responsive(lambda width: gantt(title, names, bars, width, max_seconds)), class_="whole")


def _read_trace(record: Record) -> tuple[Trace | None, str]:
    path = record.folder / TRACE
    try:
        trace = Trace.from_json(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        return None, f"No step was traced: {TRACE} is not there. It is written after the tenth step of a start."
    except (OSError, ValueError, DataError) as error:
        return None, f"{TRACE} can't be read: {error}."
    return (trace, "") if any(row.events for row in trace.ranks) else (None, f"{TRACE} holds no work of any rank.")


def _explain(trace: Trace) -> str:
    few = f" The first {_MAX_ROWS} of {len(trace.ranks):,} ranks are shown." if len(trace.ranks) > _MAX_ROWS else ""
    has_parts = any(work.action is not None for row in trace.ranks for work in row.events)
    letters = " F is the forward of a chunk, B its backward." if has_parts else ""
    return f"A row is a rank; where a row is empty, its rank waits for others.{letters}{few}"


def _bars_from_trace(trace: Trace) -> tuple[list[str], list[Bar]]:
    label_of = action_labels(event.action for row in trace.ranks for event in row.events if event.action is not None)
    names, bars = [], []
    has_places = len({row.stage for row in trace.ranks}) > 1 and len({row.replica for row in trace.ranks}) > 1
    for number, row in enumerate(trace.ranks[:_MAX_ROWS]):
        names.append(f"rank {row.rank} ({row.replica}.{row.stage})" if has_places else f"rank {row.rank}")
        for event in row.events:
            label = event.category if event.action is None else label_of(event.action)
            bars.append(Bar(number, event.category, label, event.start, event.stop))
    return names, bars


def _trace_seconds(trace: Trace) -> float:
    return max((work.stop for row in trace.ranks[:_MAX_ROWS] for work in row.events), default=0.0)


def _planned_timeline(record: Record) -> tuple[Timeline | None, str]:
    """The step of the run's layout as its plan has it, and how it was found; none if the plan says nothing of it."""
    if record.plan is None or record.config is None:
        return None, ""
    kept = timeline_from_dict(record.plan, record.config.layout)
    if kept is not None:
        return kept, "The planned step is the plan's own simulation; sums of gradients and the optimizer are not in it."
    how = (
        "The planned step is simulated from the time that the plan gives each stage, a backward as twice its forward; "
        "sums of gradients and the optimizer are not in it."
    )
    return _from_stages(find_planned_layout(record.plan, record), record.config.layout), how


def _from_stages(planned: Mapping[str, Any] | None, layout: Layout) -> Timeline | None:
    """A step of stages of which only is known how long each is busy."""
    try:
        busy = [float(stage["busy"]) for stage in planned["stages"]] if planned is not None else []
    except (KeyError, TypeError, ValueError):
        return None
    number = layout.micro_batches * layout.chunks
    if len(busy) != layout.stages or layout.stages > 256 or layout.stages * number > 20_000:
        return None

    def cost(stage: int, action: Action) -> float:
        part = _BACKWARD_FRACTION if action.kind is ActionKind.BACKWARD else 1 - _BACKWARD_FRACTION
        return busy[stage] * part / number

    return simulate(
        [stage_schedule(stage, layout.stages, layout.micro_batches, layout.chunks) for stage in range(layout.stages)],
        cost,
    )


def _parts_chart(record: Record, width: int) -> Html:
    number = record.steps.num_rows
    means = {part: value / number for part, value in record.part_seconds.items()}
    total = sum(means.values()) or 1.0
    size, unit = step_time_unit(total)
    kinds: Sequence[tuple[str, str, str]] = (
        ("data", "reading data", "fill c4"), ("compute", "forward, backward and sums", "fill c0"),
        ("optimizer", "optimizer", "fill c2"),
    )  # fmt: skip
    parts = [
        (f"{what} {format_percent(means[part] / total)}", class_, [means[part] * size]) for part, what, class_ in kinds
    ]
    title = f"The mean step of the first rank: {format_seconds(total)}"
    return stacked_bar_chart(
        title, f"{unit} a step", ["mean step"], parts, lambda value: format_seconds(value / size), width=width
    )
