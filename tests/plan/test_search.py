import time
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.profiles import bidirectional, kind, profile, profiles, with_fixed_cost
from stretto import Layout
from stretto.errors import PlanError
from stretto.plan.advice import advise
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.hardware import KNOWN_HARDWARE, BlockShape, derive_profile
from stretto.plan.one_layout import balance
from stretto.plan.predict import predict
from stretto.plan.profile import Link, Profile, RankSpeed
from stretto.plan.search import LayoutSearch, _grid, find_plan
from stretto.plan.trial import Trial
from stretto.plan.workload import Workload

LOAD = Workload.of(8, 16)


@pytest.mark.long
@given(profiles(), st.integers(1, 6), st.lists(st.integers(1, 20), min_size=4, max_size=9), st.booleans())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_layout_that_is_not_simulated_is_not_among_the_best(
    drawn: Profile, devices: int, lengths: list[int], is_bidirectional: bool
) -> None:
    drawn = bidirectional(drawn) if is_bidirectional else drawn
    workload = Workload([lengths, lengths[::2]], is_causal=not is_bidirectional)
    cluster = Cluster(devices, 2 if devices % 2 == 0 else 1)
    search = LayoutSearch(CostModel(drawn), workload, cluster, uses_all=False)
    everything = []
    for layout in search.candidates:
        fitted = search.fit(layout)
        if fitted is not None:
            everything.append(predict(CostModel(drawn), workload, fitted, cluster))
            assert search.bounds.loose_bound(layout) <= everything[-1].seconds * (1 + 1e-9)
    if not everything:
        with pytest.raises(PlanError, match="no layout"):
            find_plan(drawn, workload, cluster)
        return
    for prediction in everything:
        assert search.bounds.tight_bound(prediction.layout) <= prediction.seconds * (1 + 1e-9), (
            "a lower bound is not above the time"
        )
    plan = find_plan(drawn, workload, cluster, num_best=3)
    assert plan.num_simulated <= len(everything)
    fastest = min(prediction.seconds for prediction in everything)
    assert plan.chosen.seconds <= fastest * 1.05
    grids = {_grid(one.layout) for one in everything}
    times = {grid: min(one.seconds for one in everything if _grid(one.layout) == grid) for grid in grids}
    for prediction in plan.best:
        assert prediction.seconds == times[_grid(prediction.layout)]
    tied = [
        replicas * stages * spans for (replicas, stages, spans), seconds in times.items() if seconds <= fastest * 1.05
    ]
    assert plan.chosen.layout.num_ranks == min(tied), "about as fast, on the fewest devices"
    # After the chosen one come the best of the other grids.
    others = sorted(times.values())
    others.remove(plan.chosen.seconds)
    shown = [prediction.seconds for prediction in plan.best[1:]]
    assert shown == others[: len(shown)]
    if len(plan.best) < min(3, len(grids)):
        assert others[len(shown)] > 2 * fastest, "only layouts twice as slow are left out"
    alone = [one for one in everything if one.layout.num_ranks == 1]
    assert plan.fits_single_device == bool(alone)
    if alone:
        assert plan.single_device.seconds == min(one.seconds for one in alone)


@given(profiles())
@settings(max_examples=20, deadline=None)
def test_the_same_profile_gives_the_same_plan(drawn: Profile) -> None:
    again = Profile.model_validate_json(drawn.model_dump_json())
    plans: list[object] = []
    for one in (drawn, again):
        try:
            plans.append(find_plan(one, LOAD, Cluster(4, 2)))
        except PlanError as error:
            plans.append(str(error))
    assert plans[0] == plans[1]


def test_a_balanced_model_uses_all_devices_and_a_cheap_one_stays_on_one() -> None:
    heavy = find_plan(profile([kind(0.1, 0.2)] * 4), LOAD, Cluster(4))
    assert heavy.chosen.layout.num_ranks == 4 and heavy.speed_up(heavy.chosen) > 3
    assert advise(heavy).startswith("use ")
    link = Link(latency=0.1, bandwidth=1e6)
    light = find_plan(profile([kind(1e-4, 2e-4)] * 4, intra_node=link), LOAD, Cluster(4))
    assert light.chosen.layout.num_ranks == 1
    assert advise(light).startswith("stay on one device: the best layout on several devices, ")
    forced = find_plan(profile([kind(1e-4, 2e-4)] * 4, intra_node=link), LOAD, Cluster(4), uses_all=True)
    assert "although it is predicted to be 0." in advise(forced)


def test_the_advice_names_what_limits_the_speed_up() -> None:
    slow_reader = profile([kind(0.1, 0.2)] * 4).model_copy(update={"step_overhead": 1.0})
    assert "; reading data and other overhead take 77% of a step" in advise(find_plan(slow_reader, LOAD, Cluster(4)))
    computes_as_long = "splitting lowers the compute time per device only to 100% of that on one device"
    # A chunk with half the rows takes as long as one with all.
    assert computes_as_long in advise(find_plan(profile([kind(0, 0, start=0.1)]), LOAD, Cluster(2), uses_all=True))
    # Two ranks share one core; nothing is wrong with their chunks.
    speeds = tuple(RankSpeed(ranks=ranks, contended=1 / ranks, solo=1.0) for ranks in (1, 2))
    shared = profile([kind(0.1, 0.2)], speeds=speeds)
    assert computes_as_long in advise(find_plan(shared, LOAD, Cluster(2), uses_all=True))
    ideal = find_plan(profile([kind(0.1, 0.2)]), LOAD, Cluster(2))
    assert advise(ideal).endswith("each kind of overhead takes less than 5% of a step")


def test_fewer_devices_are_preferred_if_about_as_fast_however_many_layouts_are_listed() -> None:
    hardly_faster_on_two = profile([kind(0.03, 0.03, start=0.5)])
    for num_best in (1, 10):
        assert find_plan(hardly_faster_on_two, LOAD, Cluster(2), num_best=num_best).chosen.layout.num_ranks == 1


def test_one_device_is_compared_with_the_best_layout_on_several() -> None:
    link = Link(latency=1e-6, bandwidth=1e8)  # gradients take much longer to send than outputs
    light = profile([kind(1e-5, 1e-5, weight_bytes=10**7)] * 2, intra_node=link)
    plan = find_plan(light, Workload.of(4, 4), Cluster(3), num_best=3)
    assert [(one.layout.replicas, one.layout.stages) for one in plan.best] == [(1, 1), (1, 2)]


def test_four_ranks_on_two_cores_are_no_better_than_two() -> None:
    speeds = tuple(
        RankSpeed(ranks=ranks, contended=contended, solo=1.0) for ranks, contended in ((1, 1.0), (2, 0.98), (4, 0.49))
    )
    plan = find_plan(profile([kind(0.1, 0.2)] * 4, speeds=speeds), LOAD, Cluster(4))
    assert plan.chosen.layout.num_ranks == 2 and plan.speed_up(plan.chosen) < 2


def test_a_heavy_last_block_gets_a_stage_of_its_own() -> None:
    kinds = [kind(0, 0), *[kind(0.1, 0.2)] * 4, kind(0.4, 0.8)]
    plan = find_plan(profile(kinds), LOAD, Cluster(2), uses_all=True)
    (halves,) = [prediction.layout for prediction in plan.best if prediction.layout.stages == 2]
    assert halves.blocks == (5, 1)
    assert balance(profile(kinds), LOAD, Cluster(2), Layout(stages=2, chunks=4)).blocks == (5, 1)


def test_a_number_of_stages_that_fits_but_is_too_slow_to_be_simulated_is_not_rejected_for_memory() -> None:
    large = profile([kind(saved=1e9, weight_bytes=10**6)] * 4, memory=2e8)
    assert balance(large, LOAD, Cluster(3), Layout(stages=3, micro_batches=8, chunks=16)).stages == 3
    plan = find_plan(large, LOAD, Cluster(4))
    assert all(prediction.layout.stages != 3 for prediction in plan.best)
    assert all(rejection.layouts != "3 stages" for rejection in plan.rejected)


def test_too_little_memory_rejects_layouts_and_turns_on_recomputation() -> None:
    kinds = [kind(saved=1e9, weight_bytes=10**6)] * 4
    roomy = find_plan(profile(kinds, memory=1e12), LOAD, Cluster(2))
    assert roomy.fits_single_device and not roomy.chosen.layout.recompute
    tight = find_plan(profile(kinds, memory=1.2e9), LOAD, Cluster(2))
    assert all(prediction.memory <= 1.2e9 for prediction in tight.best)
    # Rows can't be cut further than to one; windows can, if chunks are run again.
    row = Workload.of(1, 16)
    again = find_plan(profile(kinds, memory=2e8), row, Cluster(1))
    assert again.chosen.layout.recompute and again.chosen.layout.chunks > 1 and again.chosen.memory <= 2e8
    weighty = find_plan(profile([kind(weight_bytes=10**8)] * 4, memory=1.2e9), LOAD, Cluster(2))
    assert not weighty.fits_single_device and "one device would need 1.6 GB" in advise(weighty)
    assert ("1 stage", "a rank needs more than 1.2 GB") in {
        (rejection.layouts, rejection.reason) for rejection in weighty.rejected
    }
    with pytest.raises(
        PlanError, match=r"no layout is possible with devices=2 .*needs more than 1 kB\); use more devices"
    ):
        find_plan(profile(kinds, memory=1e3), LOAD, Cluster(2))
    with pytest.raises(PlanError, match=r"no layout is possible with devices=7 .*; use fewer devices"):
        find_plan(profile(kinds), Workload.of(4, 16), Cluster(7), uses_all=True)


def test_ranks_that_share_a_machine_share_its_memory() -> None:
    kinds = [kind(0.1, 0.2, weight_bytes=10**8)]
    # Each copy takes 0.4 GB: two fit two devices of half a GB, but not one machine of half a GB.
    devices = profile(kinds, memory=5e8)
    assert find_plan(devices, LOAD, Cluster(2)).chosen.layout.replicas == 2
    machine = devices.model_copy(update={"shares_memory": True})
    assert find_plan(machine, LOAD, Cluster(2)).chosen.layout.replicas == 1


def test_a_rejected_layout_has_a_reason() -> None:
    plan = find_plan(profile([kind(0.1, 0.2)] * 2), Workload.of(2, 16), Cluster(4))
    reasons = {(rejection.layouts, rejection.reason) for rejection in plan.rejected}
    assert ("stages > 2", "each stage needs at least one block") in reasons
    assert ("replicas > 2", "each replica needs at least one row") in reasons


def test_stages_stay_on_one_node_unless_gradients_are_larger_than_activations() -> None:
    slow = Link(latency=1e-4, bandwidth=1e8)
    talkative = [kind(0.1, 0.2, output_bytes=1e6, weight_bytes=0)] * 2
    heavy = [kind(0.1, 0.2, output_bytes=1, weight_bytes=10**8)] * 2
    for kinds, adjacent in ((talkative, "stages"), (heavy, "replicas")):
        plan = find_plan(profile(kinds, inter_node=slow), LOAD, Cluster(4, 2), uses_all=True)
        grid = [
            prediction for prediction in plan.best if (prediction.layout.replicas, prediction.layout.stages) == (2, 2)
        ]
        assert min(grid, key=lambda prediction: prediction.seconds).layout.adjacent == adjacent


def test_a_model_that_looks_ahead_is_not_cut_in_time() -> None:
    plan = find_plan(profile([kind(0.1, 0.2)] * 4), Workload([[16] * 8], is_causal=False), Cluster(4))
    assert all(prediction.layout.chunks == 1 for prediction in plan.best)


def test_a_missing_link_is_an_error_that_names_it() -> None:
    alone = profile([kind()]).model_copy(update={"intra_node": None, "inter_node": None})
    assert find_plan(alone, LOAD, Cluster(1)).chosen.layout.num_ranks == 1
    with pytest.raises(
        PlanError, match="intra_node=None in the profile of test, but a node has 2 devices; set the link"
    ):
        find_plan(alone, LOAD, Cluster(2))
    with pytest.raises(PlanError, match="inter_node=None in the profile of test, but nodes=2; set the link"):
        find_plan(alone, LOAD, Cluster(2, 2))


@pytest.mark.long
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("layers", "memory", "seconds"), [(8, 80e9, 10), (30, 80e9, 30), (30, 10e9, 30)])
def test_four_thousand_devices_are_planned_in_ten_seconds(layers: int, memory: float, seconds: float) -> None:
    # The deeper ones take twenty; what else a machine does must not fail them.
    lstm = BlockShape("lstm", 8 * 4096**2, 0, 4 * 4096**2, 4096, 8 * 4096, 8192)
    blocks = [
        BlockShape("embedding", 0, 30_000 * 4096, 0, 4096),
        *[lstm] * layers,
        BlockShape("linear", 30_000 * 4096, 0, 0, 30_000, 4096),
    ]
    derived = derive_profile(KNOWN_HARDWARE["H100"], blocks, 65536, 256, fused_blocks=range(2, layers + 1))
    started = time.perf_counter()
    plan = find_plan(derived, Workload.of(65536, 256), Cluster(4096, 512, memory))
    assert time.perf_counter() - started < seconds
    assert plan.chosen.layout.num_ranks > 64 and plan.num_layouts > 500


def test_a_single_layout_can_be_predicted() -> None:
    costs = CostModel(profile([kind(0.1, 0.2)] * 2))
    one = predict(costs, LOAD, Layout(), Cluster(1))
    assert one.seconds == pytest.approx(0.6) and one.tokens_per_second == pytest.approx(128 / 0.6)
    two = predict(costs, LOAD, Layout(stages=2, chunks=8, blocks=(1, 1)), Cluster(2))
    # Eight of nine parts of the time: one chunk's bubble, and a few messages.
    assert two.seconds == pytest.approx(0.3 * 9 / 8, rel=1e-3) and two.bubble == pytest.approx(1 / 9, rel=1e-2)


def test_a_plan_shows_its_layouts_in_a_notebook() -> None:
    plan = find_plan(profile([kind(0.1, 0.2)] * 4), LOAD, Cluster(2))
    table = plan._repr_html_()
    assert table.count("<tr>") == 1 + len(plan.best) and "measured step" not in table
    assert f"<td>{plan.chosen.layout.name}</td>" in table
    tried = replace(plan, trials=(Trial(layout=plan.chosen.layout, predicted=1.0, measured=0.125),))
    assert "<th>measured step</th>" in tried._repr_html_() and "<td>125 ms</td>" in tried._repr_html_()
    assert f"<td>{plan.chosen.layout.num_ranks}</td>" in table and f"<td>{plan.speed_up(plan.chosen):.2f}</td>" in table


def test_no_layout_to_try_has_chunks_if_metrics_need_whole_rows() -> None:
    # Chunks would win if they were possible: with them, both stages would work at the same time.
    workload = Workload([[64] * 2], can_cut_time=False)
    plan = find_plan(profile([kind(0.1, 0.2)] * 4), workload, Cluster(2), uses_all=True)
    staged = [one.layout for one in (*plan.best, *plan.variants) if one.layout.stages == 2]
    assert staged and {layout.chunks for layout in staged} == {1}


def test_variants_around_a_block_that_looks_ahead_have_half_and_one_and_a_half_times_the_chunks() -> None:
    # Few rows cost nearly as much as many, so micro-batches don't pay.
    kinds = [with_fixed_cost(one, 0.5) for one in (kind(2e-3, 4e-3, start=1e-4), *[kind(start=1e-4)] * 7)]
    gnmt = profile(kinds).model_copy(update={"look_ahead_blocks": (0,)})
    plan = find_plan(gnmt, Workload([[64] * 8], is_causal=False), Cluster(2), uses_all=True)
    (staged,) = [one.layout for one in plan.best if one.layout.stages == 2]
    assert staged.chunks > 1
    variants = {(one.layout.micro_batches, one.layout.chunks) for one in plan.variants}
    assert {(staged.micro_batches, staged.chunks * factor // 2) for factor in (1, 3)} <= variants


def test_variants_of_a_split_vocabulary_behind_a_block_that_looks_ahead_keep_one_chunk() -> None:
    costs = profile([kind(2e-3, 4e-3), *[kind()] * 6, kind(0.1, 0.2)])
    costs = costs.model_copy(update={"look_ahead_blocks": (0,), "vocab_rows": 1000})
    plan = find_plan(costs, Workload([[64] * 8], is_causal=False), Cluster(2), uses_all=True)
    split = [one.layout for one in (*plan.best, *plan.variants) if one.layout.splits_vocab]
    assert split and {layout.chunks for layout in split} == {1}
