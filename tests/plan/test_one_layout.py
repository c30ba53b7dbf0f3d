"""One layout of a user's choice: predicted as the search predicts it, compared with its best, or refused."""

from dataclasses import replace

import pytest

from helpers.profiles import bidirectional, kind, profile
from stretto import Layout
from stretto.base.units import format_seconds
from stretto.errors import PlanError
from stretto.plan.advice import describe_configured
from stretto.plan.cluster import Cluster
from stretto.plan.finalists import choose_by_trials, find_finalists
from stretto.plan.one_layout import compare, predict_layout
from stretto.plan.predict import Prediction
from stretto.plan.profile import Profile
from stretto.plan.search import Plan, find_plan
from stretto.plan.trial import Trial
from stretto.plan.workload import Workload

COSTS = profile([kind(0.1, 0.2, start=0.001)] * 4)
BOTH_WAYS = bidirectional(profile([kind(0.1, 0.2)] * 4))
HEAVY = profile([kind(weight_bytes=10**8)] * 4, memory=7e8)
LOAD = Workload.of(8, 16)


def test_a_layout_is_predicted_as_the_search_predicts_it() -> None:
    cluster = Cluster(4)
    plan = find_plan(COSTS, LOAD, cluster)
    for prediction in (*plan.best, *plan.variants):
        for blocks in (prediction.layout.blocks, ()):
            layout = prediction.layout.model_copy(update={"blocks": blocks})
            assert predict_layout(COSTS, LOAD, cluster, layout) == prediction
    even, uneven = (Layout(stages=2, micro_batches=4, blocks=blocks) for blocks in ((), (1, 3)))
    slower = predict_layout(COSTS, LOAD, cluster, uneven).seconds / predict_layout(COSTS, LOAD, cluster, even).seconds
    assert slower > 1.2


@pytest.mark.parametrize(
    ("costs", "given", "runs_as"),
    [
        (COSTS, Layout(replicas=4, interleave=2), Layout(replicas=4)),
        (COSTS, Layout(replicas=4, vocab_parallel=True), Layout(replicas=4)),
        (COSTS, Layout(replicas=4, adjacent="replicas"), Layout(replicas=4)),
        (COSTS, Layout(stages=4, adjacent="replicas", elastic=True), Layout(stages=4)),
        (BOTH_WAYS, Layout(replicas=2, chunks=4), Layout(replicas=2)),
    ],
    ids=lambda value: str(value) if isinstance(value, Layout) else None,
)
def test_what_has_no_effect_in_a_layout_does_not_make_it_another_one(
    costs: Profile, given: Layout, runs_as: Layout
) -> None:
    workload = Workload([[16] * 8], is_causal=costs is COSTS)
    assert predict_layout(costs, workload, Cluster(4), given) == predict_layout(costs, workload, Cluster(4), runs_as)


@pytest.mark.parametrize(
    ("costs", "layout", "message"),
    [
        (
            COSTS,
            Layout(replicas=2, stages=4),
            r"needs 8 devices \(2 replicas x 4 stages\), but the plan is for 4; plan",
        ),
        (
            COSTS,
            Layout(micro_batches=9),
            "replicas=1 x layout.micro_batches=9 exceeds the 8 rows of the smallest batch",
        ),
        (
            COSTS,
            Layout(stages=2, blocks=(1, 2)),
            "has 3 blocks in total, but the model has 4; make the numbers sum to 4",
        ),
        (COSTS, Layout(stages=4, interleave=2), "exceeds the model's number of blocks; use at most 4 runs"),
        (COSTS, Layout(spans=2), "layout.spans=2 is for models with bidirectional or affine blocks"),
        (COSTS, Layout(stages=2, vocab_parallel=True), "needs a last block with a table of at least layout.stages=2"),
        (COSTS, Layout(auto=True), "layout.auto=true has not been resolved; use find_plan"),
        (
            BOTH_WAYS,
            Layout(stages=2, interleave=2, blocks=(1, 1, 1, 1)),
            "needs causal blocks, but block 0 looks ahead",
        ),
        (
            HEAVY,
            Layout(stages=2, blocks=(1, 3)),
            "needs 1.2 GB in 2 stages, blocks 1,3, but has 700 MB; use more stages",
        ),
        (HEAVY, Layout(stages=2, blocks=(1, 3)), "more stages or micro-batches, or recompute$"),
        (HEAVY, Layout(stages=2, blocks=(1, 3), recompute=True), "use more stages or micro-batches$"),
        (
            HEAVY,
            Layout(stages=2),
            "even with recomputation, memory is too small for 2 stages; use more stages or micro",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, Layout) else None,
)
def test_a_layout_that_is_not_possible_is_an_error(costs: Profile, layout: Layout, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        predict_layout(costs, LOAD, Cluster(4), layout)


@pytest.mark.parametrize(
    ("layout", "workload", "message"),
    [
        (Layout(stages=2, chunks=2), Workload([[16] * 8], can_cut_time=False), "layout.chunks=2 cuts windows in time"),
        (
            Layout(spans=2),
            Workload([[16] * 8], can_cut_time=False),
            "layout.spans=2 cuts windows in time, but a metric",
        ),
        (Layout(spans=2), Workload([[16] * 8], carries_state=True), "needs windows that start without state"),
        (
            Layout(replicas=4),
            Workload([[16] * 8, [16] * 3]),
            "layout.replicas=4 x .*exceeds the 3 rows of the smallest",
        ),
    ],
    ids=["chunks", "spans", "state", "rows"],
)
def test_a_layout_that_the_data_does_not_allow_is_an_error(layout: Layout, workload: Workload, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        predict_layout(BOTH_WAYS, workload, Cluster(4), layout)


def test_a_missing_link_is_an_error_that_names_it() -> None:
    alone = COSTS.model_copy(update={"intra_node": None})
    with pytest.raises(
        PlanError, match="intra_node=None in the profile of test, but a node has 2 devices; set the link"
    ):
        predict_layout(alone, LOAD, Cluster(2), Layout(replicas=2))


def slow_one(plan: Plan) -> Prediction:
    """A layout that is too slow to be tried unless the config sets it."""
    slow = predict_layout(COSTS, LOAD, plan.cluster, Layout(stages=2, micro_batches=2, blocks=(1, 3)))
    assert slow.seconds > 1.5 * plan.chosen.seconds
    return slow


def test_the_layout_in_the_config_is_compared_with_the_chosen_one() -> None:
    plan = find_plan(COSTS, LOAD, Cluster(2))
    assert describe_configured(plan) == ""
    slow = slow_one(plan)
    compared = compare(plan, slow)
    assert compared == replace(plan, configured=slow), "the chosen one stays"
    own, best = format_seconds(slow.seconds), format_seconds(plan.chosen.seconds)
    ratio = slow.seconds / plan.chosen.seconds
    times = f"is predicted to take {own} per step, {ratio:.2f} times as long as the chosen one ({best})"
    assert describe_configured(compared) == f"the layout in the config, 2 stages x 2 micro-batches, blocks 1,3, {times}"
    same = compare(plan, plan.chosen)
    assert describe_configured(same) == "the chosen layout is the one in the config" and same.best == plan.best
    assert describe_configured(compare(plan, plan.single_device)) == "", "the advice says it"
    problem = replace(plan, configured_problem="layout.stages=8 is too much")
    assert describe_configured(problem) == "the layout in the config is not compared: layout.stages=8 is too much"


def test_a_layout_that_the_search_does_not_consider_is_chosen_if_it_is_the_best() -> None:
    # The search has 6 and 8 chunks, but not 7, which is one chunk for each time step.
    costs, row, cluster = profile([kind(0.1, 0.2)] * 8), Workload.of(1, 7), Cluster(8)
    plan = find_plan(costs, row, cluster)
    own = predict_layout(costs, row, cluster, Layout(stages=8, chunks=7))
    assert own.seconds < plan.chosen.seconds / 1.1
    compared = compare(plan, own)
    assert compared.chosen is own and compared.best[1:] == plan.best
    assert describe_configured(compared) == "the chosen layout is the one in the config"


def test_a_small_gain_on_more_devices_is_called_small() -> None:
    plan = find_plan(COSTS, LOAD, Cluster(2))
    one = plan.single_device
    plan = replace(plan, best=(one,), single_device=plan.chosen)
    two = replace(one, layout=Layout(replicas=2), seconds=one.seconds * 0.97)
    compared = compare(plan, two)
    assert compared.chosen is one
    assert describe_configured(compared).endswith(", a gain smaller than the prediction error")


def test_the_layout_in_the_config_is_tried() -> None:
    plan = find_plan(COSTS, LOAD, Cluster(2))
    slow = slow_one(plan)
    compared = compare(plan, slow)
    assert find_finalists(compared, 0) == ()
    others, finalists = find_finalists(plan, 2), find_finalists(compared, 2)
    assert finalists[:2] == others and [finalist.layout for finalist in finalists[2:]] == [slow.layout]
    assert find_finalists(compare(plan, plan.chosen), 2) == others, "once"

    def tried(seconds: float | None) -> Plan:
        measured = {plan.chosen.layout: 1.0, slow.layout: seconds}
        trials = [Trial(layout=layout, predicted=1.0, measured=time) for layout, time in measured.items()]
        return choose_by_trials(compared, trials)

    assert tried(2.0).chosen == plan.chosen
    assert describe_configured(tried(2.0)).endswith(
        "took 2 s per step in its trial, 2.00 times as long as the chosen one (1 s)"
    )
    assert tried(0.5).chosen == slow
    assert describe_configured(tried(0.5)) == "the chosen layout is the one in the config"
    assert "is predicted to take" in describe_configured(tried(None)), "its trial failed"
