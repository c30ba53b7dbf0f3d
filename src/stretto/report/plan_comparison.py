"""Reality: what a plan foretold of a run, beside what came of it."""

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from stretto.config.layout import Layout
from stretto.plan.units import format_bytes, format_seconds
from stretto.report.formatting import format_percent
from stretto.report.markup import Html, tag
from stretto.report.page import note, section, table
from stretto.report.record import Record, read_int, read_number

_MEMORY = "memory of the fullest rank"


def find_planned_layout(plan: Mapping[str, Any] | None, record: Record) -> Mapping[str, Any] | None:
    """Return what a plan says of the layout that was run; none if it says nothing of it."""
    if plan is None or record.config is None:
        return None
    wanted = record.config.layout.model_dump(mode="json", exclude={"auto", "elastic"})
    best = plan.get("best")
    one = plan.get("one_device")
    listed = [found for found in [*(best if isinstance(best, list) else []), one] if isinstance(found, Mapping)]
    same = [found for found in listed if found.get("layout") == wanted]
    # Blocks that the layout leaves to be balanced are the plan's own.
    alike = [found for found in listed if _without_blocks(found.get("layout")) == _without_blocks(wanted)]
    return next(iter([*same, *alike]), None)


def plan_comparison_section(record: Record) -> Html | None:
    """Return the plan against what was measured; none if the run had no plan."""
    if record.plan is None:
        return None
    parts: list[Html | None] = []
    advice = record.plan.get("advice")
    if isinstance(advice, str):
        parts.append(tag("p", advice, class_="advice"))
    found = find_planned_layout(record.plan, record)
    rows = _rows(record, found)
    if rows:
        parts.append(table(("figure", "planned", "measured", "measured / planned"), rows))
        if any(row[0] == _MEMORY for row in rows):
            parts.append(
                note("What the plan says of memory leaves out what Python, torch and the device's driver take.")
            )
    else:
        parts.append(note("The plan says nothing of the layout that was run, so there is nothing to compare."))
    if len(record.plan_events) > 1:
        told = [
            (
                f"{read_int(line, 'step'):,}",
                format_seconds(read_number(line, "predicted")),
                format_seconds(read_number(line, "measured")),
                _ratio(line),
            )
            for line in record.plan_events[-10:]
        ]
        parts.append(note("Each start compares its own first steps:"))
        parts.append(table(("after step", "planned", "measured", "measured / planned"), told))
    if record.plan.get("is_simulated") is True:
        parts.append(note("The plan was made from a data sheet, not from measurements."))
    return section("plan", "The plan against reality", *parts)


def _rows(record: Record, found: Mapping[str, Any] | None) -> list[tuple[str, str, str, str]]:
    rows = []
    line = record.plan_events[-1] if record.plan_events else None
    planned = read_number(found, "seconds") if found is not None else math.nan
    measured = _median_step(record)
    if line is not None:
        planned, measured = read_number(line, "predicted"), read_number(line, "measured")
    rows.append(_row("seconds of a step", planned, measured, format_seconds))
    if found is not None and record.ranks is not None:
        rows.append(_row("bubble", read_number(found, "bubble"), record.ranks.bubble, format_percent))
        fullest = record.ranks.fullest
        rows.append(_row(_MEMORY, read_number(found, "memory"), fullest, format_bytes))
        stages = found.get("stages")
        layout = None if record.config is None else record.config.layout
        if isinstance(stages, list) and layout is not None and record.ranks.num_ranks == layout.num_ranks:
            for stage, told in enumerate(stages[:16] if layout.stages > 1 else ()):
                ranks = [rank for rank in range(layout.num_ranks) if _stage_of(rank, layout) == stage]
                busy = float(record.ranks.busy[ranks].mean())
                rows.append(_row(f"stage {stage} computing", read_number(told, "busy"), busy, format_seconds))
    return [row for row in rows if row is not None]


def _row(
    name: str, planned: float, measured: float, format_value: Callable[[float], str]
) -> tuple[str, str, str, str] | None:
    if not (math.isfinite(planned) and math.isfinite(measured)):
        return None
    return name, format_value(planned), format_value(measured), f"{measured / planned:.2f}" if planned > 0 else "-"


def _stage_of(rank: int, layout: Layout) -> int:
    return rank % layout.stages if layout.adjacent == "stages" else rank // layout.replicas


def _median_step(record: Record) -> float:
    took = [value for value in record.steps.mean("took").tolist() if math.isfinite(value)]
    return statistics.median(took) if took else math.nan


def _ratio(line: Mapping[str, Any]) -> str:
    planned = read_number(line, "predicted")
    return f"{read_number(line, 'measured') / planned:.2f}" if planned > 0 else "-"


def _without_blocks(layout: object) -> object:
    return {name: value for name, value in layout.items() if name != "blocks"} if isinstance(layout, Mapping) else None
