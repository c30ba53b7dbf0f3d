"""What a plan with interleaved stages or spans looks like in the terminal, as a page and as JSON."""

import io
import json

import pytest
from rich.console import Console

from helpers.profiles import bidirectional, kind, profile
from stretto.cli.views.plan_tables import show_plan
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.predict import predict_timeline
from stretto.plan.profile import AllReduceCost, Profile
from stretto.plan.search import find_plan
from stretto.plan.serialize import plan_to_dict, timeline_from_plan
from stretto.plan.workload import Workload
from stretto.report.plan_page import plan_page

# Replicas would wait long for the all-reduce of their gradients.
SLOW = AllReduceCost(ranks=2, latency=0.0, bandwidth=8e6)
DEEP = profile([kind(0.1, 0.2, start=0.001, weight_bytes=10**6)] * 8, all_reduces=(SLOW,))
BOTH_WAYS = bidirectional(profile([kind(0.1, 0.2)] * 4))


@pytest.mark.parametrize(
    ("used", "rows", "expected"),
    [
        (DEEP, 8, ["interleave", "stage 0", "stage 1", "load balance of the stages", "0 | 2 | 4 | 6"]),
        (BOTH_WAYS, 1, ["1 x 2 spans x 1", "span 0", "span 1", "load balance of the spans", "0 ... 3"]),
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
    assert timeline_from_plan(values, chosen) is not None
