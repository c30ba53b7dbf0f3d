"""Plan and measurement: what the plan predicted for a run beside what was measured."""

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from stretto.config.layout import Layout
from stretto.plan.units import format_bytes, format_seconds
from stretto.report.formatting import format_percent
from stretto.report.markup import Html, tag
from stretto.report.page import note, section, table
from stretto.report.record import JsonObject, RankMeans, Record, StepHistory, read_int, read_number

_MEMORY = "memory of the fullest rank"

_Row = tuple[str, str, str, str]


def find_planned_layout(plan: Mapping[str, Any] | None, record: Record) -> Mapping[str, Any] | None:
    """Return the plan's prediction for the layout of a run; None if the plan does not have one."""
    if plan is None or record.config is None:
        return None
    layout = record.config.layout.model_dump(mode="json", exclude={"auto", "elastic"})
    best = plan.get("best")
    listed = [*(best if isinstance(best, list) else []), plan.get("one_device")]
    predictions = [prediction for prediction in listed if isinstance(prediction, Mapping)]
    same = [prediction for prediction in predictions if prediction.get("layout") == layout]
    # A layout without `blocks` is balanced by the plan, so its blocks may differ.
    similar = [one for one in predictions if _without_blocks(one.get("layout")) == _without_blocks(layout)]
    return next(iter([*same, *similar]), None)


def plan_comparison_section(record: Record) -> Html | None:
    """Return the plan beside the measurements; None if the run had no plan."""
    if record.plan is None:
        return None
    parts: list[Html | None] = []
    advice = record.plan.get("advice")
    if isinstance(advice, str):
        parts.append(tag("p", advice, class_="advice"))
    rows = _rows(record, find_planned_layout(record.plan, record))
    if rows:
        parts.append(table(("quantity", "planned", "measured", "measured / planned"), rows))
        if any(row[0] == _MEMORY for row in rows):
            parts.append(note("The planned memory excludes Python, torch and the device driver."))
    else:
        parts.append(note("The plan has no prediction for the layout of this run."))
    if len(record.plan_events) > 1:
        compared = [_event_row(line) for line in record.plan_events]
        parts.append(note("Each start compares its own first steps:"))
        parts.append(table(("after step", "planned", "measured", "measured / planned"), compared))
    if record.plan.get("is_simulated") is True:
        parts.append(note("The plan is based on a data sheet, not on measurements."))
    return section("plan", "Plan and measurement", *parts)


def _rows(record: Record, prediction: JsonObject | None) -> list[_Row]:
    seconds = math.nan if prediction is None else read_number(prediction, "seconds")
    measured = _median_step(record.steps)
    if record.plan_events:
        line = record.plan_events[-1]
        seconds, measured = read_number(line, "predicted"), read_number(line, "measured")
    rows = [_row("time per step", seconds, measured, format_seconds)]
    ranks = record.ranks
    if prediction is not None and ranks.num_ranks:
        rows.append(_row("bubble", read_number(prediction, "bubble"), ranks.bubble, format_percent))
        rows.append(_row(_MEMORY, read_number(prediction, "memory"), ranks.max_memory, format_bytes))
        if record.config is not None:
            rows += _stage_rows(prediction.get("stages"), ranks, record.config.layout)
    return [row for row in rows if row is not None]


def _stage_rows(stages: object, ranks: RankMeans, layout: Layout) -> list[_Row | None]:
    if not isinstance(stages, list) or layout.stages == 1 or ranks.num_ranks != layout.num_ranks:
        return []
    rows = []
    for index, stage in enumerate(stage for stage in stages[:16] if isinstance(stage, Mapping)):
        members = [rank for rank in range(layout.num_ranks) if _stage_of(rank, layout) == index]
        busy = float(ranks.busy[members].mean())
        rows.append(_row(f"compute of stage {index}", read_number(stage, "busy"), busy, format_seconds))
    return rows


def _row(name: str, planned: float, measured: float, format_value: Callable[[float], str]) -> _Row | None:
    if not (math.isfinite(planned) and math.isfinite(measured)):
        return None
    return name, format_value(planned), format_value(measured), _ratio(measured, planned)


def _event_row(line: JsonObject) -> _Row:
    planned, measured = read_number(line, "predicted"), read_number(line, "measured")
    step = f"{read_int(line, 'step'):,}"
    return step, format_seconds(planned), format_seconds(measured), _ratio(measured, planned)


def _ratio(measured: float, planned: float) -> str:
    return f"{measured / planned:.2f}" if planned > 0 else "-"


def _stage_of(rank: int, layout: Layout) -> int:
    return rank % layout.stages if layout.adjacent == "stages" else rank // layout.replicas


def _median_step(steps: StepHistory) -> float:
    seconds = [value for value in steps.series.mean("took").tolist() if math.isfinite(value)]
    return statistics.median(seconds) if seconds else math.nan


def _without_blocks(layout: object) -> object:
    return {name: value for name, value in layout.items() if name != "blocks"} if isinstance(layout, Mapping) else None
