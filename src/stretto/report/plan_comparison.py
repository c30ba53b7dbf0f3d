"""Compare what a plan predicted for a run with what was measured."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping

from stretto.base.units import format_bytes, format_seconds
from stretto.config.layout import Layout
from stretto.plan.serialize import is_same_layout, trials_from_plan
from stretto.report.formatting import format_percent
from stretto.report.markup import Html, tag
from stretto.report.page import note, section, table
from stretto.report.record import JsonObject, RankMeans, Record, StepHistory, read_int, read_number
from stretto.report.trial_table import trial_table

_MEMORY = "highest memory use of a rank"  # the name of a row
_MAX_STAGES = 16  # stages whose busy times are in the table
_Row = tuple[str, str, str, str]  # the cells: quantity, planned, measured, ratio
# A name, the planned and the measured value, and how to format both.
_Quantity = tuple[str, float, float, Callable[[float], str]]


def find_prediction(record: Record) -> JsonObject | None:
    """Return the plan's prediction for the layout of a run; None if there is none."""
    if record.plan is None or record.config is None:
        return None
    layout = record.config.layout
    best = record.plan.get("best")
    listed = [*(best if isinstance(best, list) else []), record.plan.get("one_device")]
    predictions = [prediction for prediction in listed if isinstance(prediction, Mapping)]
    same = [prediction for prediction in predictions if is_same_layout(prediction.get("layout"), layout)]
    # If the config leaves out `blocks`, the plan fills it in. So also accept a layout that differs only in its blocks.
    similar = [
        prediction
        for prediction in predictions
        if is_same_layout(prediction.get("layout"), layout, compares_blocks=False)
    ]
    return next(iter([*same, *similar]), None)


def plan_comparison_section(record: Record) -> Html | None:
    """Return a section with predicted and measured values side by side; None if the run had no plan."""
    if record.plan is None:
        return None
    parts: list[Html | None] = []
    advice = record.plan.get("advice")
    if isinstance(advice, str):
        parts.append(tag("p", advice, class_="advice"))
    trials = trials_from_plan(record.plan)
    parts += trial_table(trials)
    rows = _rows(record, find_prediction(record))
    if rows:
        parts.append(table(("quantity", "planned", "measured", "measured / planned"), rows))
        if trials:
            parts.append(note("The planned time per step is that of the trial; other planned values are predicted."))
        if any(row[0] == _MEMORY for row in rows):
            scope = "The planned bubble and busy times cover forwards and backwards, the measured ones the whole step."
            parts.append(note(f"{scope} The planned memory excludes Python, torch and the device driver."))
    else:
        parts.append(note("The plan has no prediction for the layout of this run, or no step was measured yet."))
    if len(events := record.plan_events) > 1:
        rows = [_row(f"{read_int(line, 'step'):,}", *_event_seconds(line), format_seconds) for line in events]
        parts.append(note("Each launch compares the time of its early steps with the plan:"))
        parts.append(table(("after step", "planned", "measured", "measured / planned"), rows))
    if record.plan.get("is_estimated") is True:
        parts.append(note("The plan is based on a data sheet, not on measurements."))
    return section("plan", "Plan and measurement", *parts)


def _rows(record: Record, prediction: JsonObject | None) -> list[_Row]:
    if record.plan_events:  # their measured times leave out the slow first steps of a launch
        planned, measured = _event_seconds(record.plan_events[-1])
    else:
        planned = math.nan if prediction is None else _first_number(prediction, "measured_seconds", "seconds")
        measured = _median_step_seconds(record.steps)
    quantities: list[_Quantity] = [("time per step", planned, measured, format_seconds)]
    ranks = record.ranks
    if prediction is not None and ranks.num_ranks:
        quantities.append(("bubble", read_number(prediction, "bubble"), ranks.bubble, format_percent))
        quantities.append((_MEMORY, read_number(prediction, "memory"), ranks.max_memory, format_bytes))
        if record.config is not None:
            quantities += _stage_quantities(prediction.get("stages"), ranks, record.config.layout)
    return [_row(*quantity) for quantity in quantities if math.isfinite(quantity[1]) and math.isfinite(quantity[2])]


def _stage_quantities(stages: object, ranks: RankMeans, layout: Layout) -> Iterator[_Quantity]:
    if isinstance(stages, list) and layout.stages > 1 and len(ranks.busy) == layout.num_ranks:
        # Busy times as [stages, replicas]: adjacent ranks are the stages of one replica, or the replicas of one stage.
        are_stages_adjacent = layout.adjacent == "stages"
        busy = ranks.busy.reshape(-1, layout.stages).T if are_stages_adjacent else ranks.busy.reshape(layout.stages, -1)
        planned = [stage for stage in stages[:_MAX_STAGES] if isinstance(stage, Mapping)]
        for index, (stage, seconds) in enumerate(zip(planned, busy.mean(axis=1).tolist(), strict=False)):
            yield f"busy time of stage {index}", read_number(stage, "busy"), seconds, format_seconds


def _event_seconds(line: JsonObject) -> tuple[float, float]:
    return _first_number(line, "tried", "predicted"), read_number(line, "measured")


def _row(name: str, planned: float, measured: float, format_value: Callable[[float], str]) -> _Row:
    ratio = f"{measured / planned:.2f}" if planned > 0 else "-"
    return name, format_value(planned), format_value(measured), ratio


def _first_number(values: JsonObject, *names: str) -> float:
    """Return the first of these fields that is a number: that of a trial, or else that of the prediction."""
    numbers = (read_number(values, name) for name in names)
    return next((number for number in numbers if math.isfinite(number)), math.nan)


def _median_step_seconds(steps: StepHistory) -> float:
    seconds = [value for value in steps.series.mean("step_seconds").tolist() if math.isfinite(value)]
    return statistics.median(seconds) if seconds else math.nan
