"""Step: one step as it was measured, rank by rank, and beside it as the plan had it."""

from collections.abc import Mapping, Sequence
from typing import Any

from stretto.base.errors import DataError
from stretto.config.layout import Layout
from stretto.plan.actions import Action, Kind
from stretto.plan.orders import order
from stretto.plan.show import read_timeline
from stretto.plan.timeline import Timeline, simulate
from stretto.plan.trace import Trace
from stretto.plan.units import seconds
from stretto.report.amounts import share, short_unit
from stretto.report.chart import stacked_rows
from stretto.report.gantt import Piece, gantt, pieces_of
from stretto.report.markup import Html
from stretto.report.page import any_width, figure, note, section
from stretto.report.reality import planned_layout
from stretto.report.record import Record

TRACE = "trace.json"
# What is not known of a plan's step but its stages' time: a backward is about twice its forward.
_BACKWARD = 2 / 3
# More than these are a smear, and say no more.
_MOST_ROWS = 32


def step_section(record: Record) -> Html:
    """Return the measured timeline, the simulated one, and what the mean step was spent on."""
    parts: list[Html | None] = []
    trace, why = _read_trace(record)
    simulated, how = _simulated(record)
    ends = [timeline.seconds for timeline in (simulated,) if timeline] + [_end(found) for found in (trace,) if found]
    until = max(ends, default=None)
    if trace is None:
        parts.append(note(why))
    else:
        names, pieces = _measured(trace)
        parts += [note(_explain(trace)), _picture(f"Step {trace.step:,} as it was measured", names, pieces, until)]
    if simulated is not None:
        names = [f"stage {stage}" for stage in range(min(simulated.num_stages, _MOST_ROWS))]
        parts += [_picture("A step of one replica as it was planned", names, pieces_of(simulated), until), note(how)]
    if record.seconds:
        parts.append(figure(any_width(lambda width: _parts_chart(record, width)), class_="whole"))
    return section("step", "One step", *parts)


def _picture(title: str, names: Sequence[str], pieces: Sequence[Piece], until: float | None) -> Html:
    return figure(any_width(lambda width: gantt(title, names, pieces, width, until)), class_="whole")


def _read_trace(record: Record) -> tuple[Trace | None, str]:
    path = record.folder / TRACE
    try:
        trace = Trace.from_json(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        return None, f"No step was traced: {TRACE} is not there. It is written after the tenth step of a start."
    except (OSError, ValueError, DataError) as error:
        return None, f"{TRACE} can't be read: {error}."
    return (trace, "") if any(row.works for row in trace.rows) else (None, f"{TRACE} holds no work of any rank.")


def _explain(trace: Trace) -> str:
    few = f" The first {_MOST_ROWS} of {len(trace.rows):,} ranks are shown." if len(trace.rows) > _MOST_ROWS else ""
    has_parts = any(work.action is not None for row in trace.rows for work in row.works)
    letters = " F is the forward of a chunk, B its backward." if has_parts else ""
    return f"A row is a rank; where a row is empty, its rank waits for others.{letters}{few}"


def _measured(trace: Trace) -> tuple[list[str], list[Piece]]:
    works = [work for row in trace.rows for work in row.works if work.action is not None]
    has_slices = any(work.action is not None and work.action.slice for work in works)
    names, pieces = [], []
    has_places = len({row.stage for row in trace.rows}) > 1 and len({row.replica for row in trace.rows}) > 1
    for number, row in enumerate(trace.rows[:_MOST_ROWS]):
        names.append(f"rank {row.rank} ({row.replica}.{row.stage})" if has_places else f"rank {row.rank}")
        for work in row.works:
            action = work.action
            label: str = work.category
            if action is not None:
                label = str(action) if has_slices else f"{action.kind.value}{action.chunk}"
            pieces.append(Piece(number, work.category, label, work.start, work.stop))
    return names, pieces


def _end(trace: Trace) -> float:
    return max((work.stop for row in trace.rows[:_MOST_ROWS] for work in row.works), default=0.0)


def _simulated(record: Record) -> tuple[Timeline | None, str]:
    """The step of the run's layout as its plan has it, and how it was found; none if the plan says nothing of it."""
    if record.plan is None or record.config is None:
        return None, ""
    kept = read_timeline(record.plan, record.config.layout)
    if kept is not None:
        return kept, "The planned step is the plan's own simulation; sums of gradients and the optimizer are not in it."
    how = (
        "The planned step is simulated from the time that the plan gives each stage, a backward as twice its forward; "
        "sums of gradients and the optimizer are not in it."
    )
    return _from_stages(planned_layout(record.plan, record), record.config.layout), how


def _from_stages(planned: Mapping[str, Any] | None, layout: Layout) -> Timeline | None:
    """A step of stages of which only is known how long each is busy."""
    try:
        busy = [float(stage["busy"]) for stage in planned["stages"]] if planned is not None else []
    except (KeyError, TypeError, ValueError):
        return None
    number = layout.slices * layout.chunks
    if len(busy) != layout.stages or layout.stages > 256 or layout.stages * number > 20_000:
        return None

    def cost(stage: int, action: Action) -> float:
        part = _BACKWARD if action.kind is Kind.BACKWARD else 1 - _BACKWARD
        return busy[stage] * part / number

    return simulate([order(stage, layout.stages, layout.slices, layout.chunks) for stage in range(layout.stages)], cost)


def _parts_chart(record: Record, width: int) -> Html:
    number = record.steps.num_rows
    means = {part: value / number for part, value in record.parts.items()}
    total = sum(means.values()) or 1.0
    size, unit = short_unit(total)
    kinds: Sequence[tuple[str, str, str]] = (
        ("data", "reading data", "fill c4"), ("compute", "forward, backward and sums", "fill c0"),
        ("optimizer", "optimizer", "fill c2"),
    )  # fmt: skip
    parts = [(f"{what} {share(means[part] / total)}", class_, [means[part] * size]) for part, what, class_ in kinds]
    title = f"The mean step of the first rank: {seconds(total)}"
    return stacked_rows(title, f"{unit} a step", ["mean step"], parts, lambda value: seconds(value / size), width=width)
