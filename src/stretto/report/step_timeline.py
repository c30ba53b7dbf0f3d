"""The step timeline: one step as measured, rank by rank."""

from stretto.base.errors import DataError
from stretto.base.run_folder import TRACE, RunFolder
from stretto.base.units import format_seconds
from stretto.plan.trace import Trace
from stretto.report.bar_rows import stacked_bar_chart
from stretto.report.chart import StackedPart
from stretto.report.formatting import format_percent, step_time_unit
from stretto.report.gantt import bars_from_trace, gantt
from stretto.report.markup import Html
from stretto.report.page import figure, note, section
from stretto.report.record import Record, StepHistory

_MAX_ROWS = 32  # more rows would be hard to read and show nothing new
_NO_TRACE = f"No trace yet: {TRACE} is written after a launch's tenth step, or its last if there are fewer."
_PHASES = {"data": "reading data", "compute": "forward, backward and all-reduce", "optimizer": "optimizer"}


def step_section(record: Record) -> Html:
    """Return the section with a measured step, and the phases of the mean step."""
    parts: list[Html | None] = []
    trace, problem = _read_trace(record)
    if trace is None:
        parts.append(note(problem))
    else:
        chart = gantt(f"Step {trace.step:,}, measured", *bars_from_trace(trace, _MAX_ROWS))
        parts += [note(_explain(trace)), figure(chart.to_html(), "full-width")]
    if record.steps.seconds:
        parts.append(figure(_phases_chart(record.steps), "full-width"))
    return section("timeline", "Step timeline", *parts)


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
