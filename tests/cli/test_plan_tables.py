"""What a plan with interleaved stages or spans looks like in the terminal, as a page and as JSON."""

import io
import json

import pytest
from rich.console import Console

from helpers.profiles import bidirectional, kind, profile
from stretto.base.units import format_seconds
from stretto.cli.views.plan_tables import show_plan
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.finalists import choose_by_trials
from stretto.plan.predict import predict_timeline
from stretto.plan.profile import AllReduceCost, Profile
from stretto.plan.search import Plan, find_plan
from stretto.plan.serialize import plan_to_dict
from stretto.plan.trial import Trial
from stretto.plan.workload import Workload
from stretto.report.plan_page import plan_page

# Replicas would wait long for the all-reduce of their gradients.
SLOW = AllReduceCost(ranks=2, latency=0.0, bandwidth=8e6)
DEEP = profile([kind(0.1, 0.2, start=0.001, weight_bytes=10**6)] * 8, all_reduces=(SLOW,))
BOTH_WAYS = bidirectional(profile([kind(0.1, 0.2)] * 4))
LOAD = Workload.of(8, 16)


@pytest.mark.parametrize(
    ("used", "rows", "expected"),
    [
        (DEEP, 8, ["chunks, interleave", "stage 0", "stage 1", "load balance of the stages", "0 | 2 | 4 | 6"]),
        (BOTH_WAYS, 1, [">  2 spans ", "span 0", "span 1", "load balance of the spans", "0 ... 3"]),
    ],
    ids=["interleaved", "spans"],
)
def test_interleaved_stages_and_spans_are_shown(used: Profile, rows: int, expected: list[str]) -> None:
    workload = Workload([[16] * rows], is_causal=used is DEEP)
    plan = find_plan(used, workload, Cluster(2))
    chosen = plan.chosen.layout
    assert chosen.is_interleaved == (used is DEEP) and chosen.spans == (1 if used is DEEP else 2)
    timeline = predict_timeline(CostModel(used), workload, chosen, plan.cluster)
    console = Console(file=io.StringIO(), width=140)
    show_plan(console, plan, used, timeline)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for part in expected:
        assert part in text
    assert ("interleave = " if chosen.is_interleaved else "spans = 2") in text
    page = plan_page(plan, used, workload, timeline, "run.toml")
    assert ("span 1: blocks 0 to 3" if chosen.spans > 1 else f", interleave {chosen.interleave}") in page
    values = json.loads(json.dumps(plan_to_dict(plan, used, timeline)))
    best = values["best"][0]
    assert best["layout"]["spans"] == chosen.spans and best["layout"]["interleave"] == chosen.interleave
    assert len(best["stages"]) == 2 and len(best["stages"][0]["runs"]) == chosen.interleave
    assert values["timeline"]["actions"]


def printed(plan: Plan, width: int) -> str:
    timeline = predict_timeline(CostModel(DEEP), LOAD, plan.chosen.layout, plan.cluster)
    console = Console(file=io.StringIO(), width=width)
    show_plan(console, plan, DEEP, timeline)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("is_tried", [False, True], ids=["predicted", "tried"])
@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_table_of_a_plan_is_whole_in_a_terminal_of_any_width(width: int, is_tried: bool) -> None:
    plan = find_plan(DEEP, LOAD, Cluster(2))
    if is_tried:
        plan = tried(plan)
    text = printed(plan, width)
    table = text.partition("speed-up over")[0].splitlines()
    assert "…" not in text and max(map(len, table)) <= width
    for prediction in plan.best[:3]:
        for figure in (format_seconds(prediction.seconds), f"{plan.speed_up(prediction):.2f}"):
            assert any(f" {figure} " in line for line in table), (figure, text)
    for header in ("sent/rank", "tokens/s", "bubble"):
        is_left_out = any(line.startswith("left out") and header in line for line in table)
        assert is_left_out or any(f" {header} " in f"{line} " for line in table), "shown, or named as left out"
    assert ("left out" in text) == (width == 80 or (width == 100 and is_tried)), text


def tried(plan: Plan) -> Plan:
    """The plan after trials of all its layouts, in which the order is the other way round, and the last has failed."""
    predictions = [*plan.best, *plan.variants]
    trials = [
        Trial(layout=each.layout, predicted=each.seconds, measured=0.1 * (len(predictions) - index), steps=14)
        for index, each in enumerate(predictions)
    ]
    return choose_by_trials(plan, [*trials[1:], trials[0].model_copy(update={"measured": None, "note": "no memory"})])


def test_every_layout_that_was_tried_has_a_row_with_its_measured_time() -> None:
    plan = tried(find_plan(DEEP, LOAD, Cluster(2)))
    assert len(plan.trials) > 4 and plan.chosen.layout == plan.trials[-2].layout
    timeline = predict_timeline(CostModel(DEEP), LOAD, plan.chosen.layout, plan.cluster)
    page = plan_page(plan, DEEP, LOAD, timeline, "run.toml")
    text = printed(plan, 200)
    single = plan.measured_seconds(plan.single_device.layout)
    assert single is not None and "measured" in text and "failed: " in text and ": no memory" in text
    for trial in plan.trials:
        (row,) = [line for line in text.splitlines() if f" {trial.layout.name}  " in line]
        measured = "failed" if trial.measured is None else format_seconds(trial.measured)
        speed_up = "-" if trial.measured is None else f"{single / trial.measured:.2f}"
        assert f" {measured} " in row and f" {speed_up} " in row
        assert f"<td class='number'>{measured}</td>".replace("'", '"') in page
        if trial.measured is not None:
            assert f", measured {measured}" in page, "beside the predicted bar"
    assert text.index(">") < text.index(plan.chosen.layout.name)
