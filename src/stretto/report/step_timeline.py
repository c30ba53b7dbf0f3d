"""The step timeline: one step as measured, rank by rank, and as the plan simulated it."""

from collections.abc import Sequence

from stretto.base.errors import DataError
from stretto.base.run_folder import TRACE, RunFolder
from stretto.base.units import format_seconds
from stretto.config.layout import Layout
from stretto.plan.actions import Action, ActionKind
from stretto.plan.run_chain import RunChain
from stretto.plan.schedule import chain_schedule
from stretto.plan.serialize import timeline_from_plan
from stretto.plan.simulator import simulate
from stretto.plan.timeline import Timeline
from stretto.plan.trace import Trace
from stretto.report.bar_rows import stacked_bar_chart
from stretto.report.chart import StackedPart
from stretto.report.formatting import format_percent, step_time_unit
from stretto.report.gantt import Bar, bars_from_timeline, bars_from_trace, gantt, stage_names
from stretto.report.markup import Html
from stretto.report.page import figure, note, section
from stretto.report.plan_comparison import find_prediction
from stretto.report.record import JsonObject, Record, StepHistory

# Assumed if a plan has no timeline, only the busy time of each stage: a backward takes twice as long as its forward.
_BACKWARD_FRACTION = 2 / 3
_MAX_ROWS = 32  # more rows would be hard to read and show nothing new
_MAX_STAGES, _MAX_FORWARDS = 256, 20_000  # simulating more would take too long for a page
_NO_TRACE = f"No trace yet: {TRACE} is written after a launch's tenth step, or its last if there are fewer."
_PHASES = {"data": "reading data", "compute": "forward, backward and all-reduce", "optimizer": "optimizer"}


def step_section(record: Record) -> Html:
    """Return the section with a measured step, the planned step, and the phases of the mean step."""
    parts: list[Html | None] = []
    trace, problem = _read_trace(record)
    names, bars = bars_from_trace(trace, _MAX_ROWS) if trace else ([], [])
    timeline, origin = _planned_timeline(record)
    # Both charts share one time axis, so that they can be compared by eye.
    max_seconds = max([timeline.seconds if timeline else 0.0, *(bar.stop for bar in bars)])
    if trace is None:
        parts.append(note(problem))
    else:
        parts += [note(_explain(trace)), _gantt_figure(f"Step {trace.step:,}, measured", names, bars, max_seconds)]
    if timeline is not None:
        row_name = "span" if record.config is not None and record.config.layout.spans > 1 else "stage"
        names, bars = stage_names(timeline, row_name)[:_MAX_ROWS], bars_from_timeline(timeline)
        parts += [_gantt_figure("Step of one replica, planned", names, bars, max_seconds), note(origin)]
    if record.steps.seconds:
        parts.append(figure(_phases_chart(record.steps), "full-width"))
    return section("timeline", "Step timeline", *parts)


def _gantt_figure(title: str, names: Sequence[str], bars: Sequence[Bar], max_seconds: float) -> Html:
    return figure(gantt(title, names, bars, max_seconds).to_html(), "full-width")


def _read_trace(record: Record) -> tuple[Trace | None, str]:
    """Return the measured step; or None and a sentence that says why there is none."""
    folder = RunFolder(record.folder)
    try:
        content = folder.read(TRACE)
        if content is None:
            return None, _NO_TRACE
        trace = Trace.from_json(content, str(folder.trace))
    except (OSError, ValueError, DataError) as error:
        return None, f"{TRACE} can't be read: {error}."
    return (trace, "") if any(row.events for row in trace.ranks) else (None, f"{TRACE} contains no events.")


def _explain(trace: Trace) -> str:
    num_ranks = len(trace.ranks)
    hidden = f" The first {_MAX_ROWS} of {num_ranks:,} traced ranks are shown." if num_ranks > _MAX_ROWS else ""
    has_actions = any(event.action is not None for row in trace.ranks for event in row.events)
    letters = " F is the forward of a chunk, B its backward." if has_actions else ""
    return f"One row per rank; where a row is empty, the rank waits for others.{letters}{hidden}"


def _planned_timeline(record: Record) -> tuple[Timeline | None, str]:
    """Return the planned step and a note on how it was computed; or None if the plan has no usable times."""
    if record.plan is None or record.config is None:
        return None, ""
    scope = "It does not include the all-reduce of gradients or the optimizer."
    timeline = timeline_from_plan(record.plan, record.config.layout)
    if timeline is not None:
        return timeline, f"The planned step is the plan's own simulation. {scope}"
    origin = "The planned step is simulated from the busy time of each stage"
    timeline = _timeline_from_busy_times(find_prediction(record), record.config.layout)
    return timeline, f"{origin}, with a backward twice as long as its forward. {scope}"


def _timeline_from_busy_times(prediction: JsonObject | None, layout: Layout) -> Timeline | None:
    """Simulate a step from the busy time of each stage; None if those times are unknown, or the step is too large."""
    try:
        busy = [float(stage["busy"]) for stage in prediction["stages"]] if prediction is not None else []
    except (KeyError, TypeError, ValueError):
        return None
    num_forwards = layout.micro_batches * layout.chunks * layout.num_runs // layout.stages
    if (
        layout.splits_vocab
        or layout.spans > 1
        or len(busy) != layout.stages
        or layout.stages > _MAX_STAGES
        or layout.stages * num_forwards > _MAX_FORWARDS
    ):
        return None

    def cost(stage: int, action: Action) -> float:
        fraction = _BACKWARD_FRACTION if action.kind is ActionKind.BACKWARD else 1 - _BACKWARD_FRACTION
        return busy[stage] * fraction / num_forwards

    chain = RunChain.of(layout.stages, layout.num_runs // layout.stages)
    sizes = layout.micro_batches, layout.chunks
    return simulate([chain_schedule(chain, stage, *sizes) for stage in range(layout.stages)], cost, chain=chain)


def _phases_chart(steps: StepHistory) -> Html:
    means = [steps.series.total(phase) / steps.series.num_rows for phase in _PHASES]
    total = sum(means) or 1.0
    factor, unit = step_time_unit(total)
    parts = [
        StackedPart(f"{name} {format_percent(mean / total)}", css_class, [mean])
        for name, css_class, mean in zip(_PHASES.values(), ("c4", "c0", "c2"), means, strict=True)  # as in gantt.py
    ]
    title = f"Mean step of rank 0: {format_seconds(total)}"
    return stacked_bar_chart(title, (factor, f"{unit} per step"), ["mean step"], parts, format_seconds)
