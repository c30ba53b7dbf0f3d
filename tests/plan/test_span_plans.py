"""Predictions and plans of spans: the time, the memory and the messages of the order that is executed."""

from collections.abc import Callable

import pytest
import torch

from helpers.profiles import affine, bidirectional, kind, profile
from stretto import Layout
from stretto.blocks.span_program import SpanProgram
from stretto.errors import PlanError
from stretto.measure.span_sweeps import find_span_obstacle, find_sweeps
from stretto.nn import LSTM, BidirectionalGRU, BidirectionalLSTM, Dropout, Linear, MinGRU, Stack
from stretto.plan.actions import ActionKind
from stretto.plan.candidates import CandidateLayouts
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.one_layout import balance
from stretto.plan.predict import predict, predict_timeline
from stretto.plan.profile import AllReduceCost, Link, Profile, SweepCosts
from stretto.plan.search import find_plan
from stretto.plan.span_costs import AFFINE_OVERHEAD
from stretto.plan.span_schedule import SpanGrid, SweepShape, span_schedules
from stretto.plan.workload import Workload

FREE = Link(latency=0.0, bandwidth=1e18)
LOAD = Workload([[16] * 8], is_causal=False)
EQUAL = bidirectional(profile([kind(0.1, 0.2)] * 4, intra_node=FREE))


def test_two_spans_of_equal_layers_are_twice_as_fast_as_one_device() -> None:
    one = predict(CostModel(EQUAL), LOAD, Layout(), Cluster(1))
    two = predict(CostModel(EQUAL), LOAD, Layout(spans=2), Cluster(2))
    assert one.seconds / two.seconds == pytest.approx(2) and two.bubble == pytest.approx(0, abs=1e-9)
    # Four need micro-batches: without them, half of the spans wait.
    four = predict(CostModel(EQUAL), LOAD, Layout(spans=4), Cluster(4))
    assert four.bubble == pytest.approx(0.5) and one.seconds / four.seconds == pytest.approx(2)
    filled = predict(CostModel(EQUAL), LOAD, Layout(spans=4, micro_batches=4), Cluster(4))
    assert one.seconds / filled.seconds > 3.5


def test_the_simulated_actions_are_those_that_the_engine_runs() -> None:
    workload = Workload([[16, 16, 9, 3]], is_causal=False)
    timeline = predict_timeline(CostModel(EQUAL), workload, Layout(spans=3, micro_batches=2), Cluster(3))
    shapes = workload.split(1, 2, 3)[0]
    sweeps = tuple(SweepShape(layer, is_reverse) for layer in range(4) for is_reverse in (False, True))
    grid = SpanGrid(sweeps, 3, tuple(len(shape.chunk_bounds) for shape in shapes))
    for span, actions in enumerate(span_schedules(grid)):
        assert [timed.action for timed in timeline.timed_actions if timed.stage == span] == list(actions)


def test_blocks_between_layers_run_with_the_sweep_that_they_wait_for() -> None:
    # Block 0 and 2 have no sweeps: they run before layer 0 and between the layers; block 4 with the loss at the end.
    kinds = [kind(1.0, 2.0), kind(0.1, 0.2), kind(10.0, 20.0), kind(0.1, 0.2), kind(100.0, 200.0)]
    sweeps = tuple(
        SweepCosts(block=block, layer=layer, is_reverse=is_reverse, state_bytes=16)
        for layer, block in enumerate((1, 3))
        for is_reverse in (False, True)
    )
    drawn = profile(kinds, intra_node=FREE).model_copy(update={"sweeps": sweeps, "look_ahead_blocks": (1, 3)})
    timeline = predict_timeline(CostModel(drawn), LOAD, Layout(spans=2), Cluster(2))
    seconds = {str(timed.action): timed.stop - timed.start for timed in timeline.timed_actions if timed.stage == 0}
    # Half of the time steps, and each direction is half of its layer.
    # The backward of the last block and the loss follows their forward at once.
    expected = {"F0.0": 0.5 + 0.025, "F0.1": 0.025 + 5, "F0.2": 0.025, "F0.3": 0.025 + 50 + 100}
    expected |= {"B0.3": 0.05, "B0.2": 0.05 + 10, "B0.1": 0.05, "B0.0": 0.05 + 1}
    assert seconds == pytest.approx(expected)


def test_a_state_costs_as_much_as_its_link() -> None:
    slow = Link(latency=1.0, bandwidth=1e18)
    costs = CostModel(bidirectional(profile([kind(1e-9, 1e-9)] * 4, intra_node=slow)))
    # Four layers, forward and backward, one swap of states each; there is none before the first.
    timeline = predict_timeline(costs, LOAD, Layout(spans=2), Cluster(2))
    assert timeline.seconds == pytest.approx(8 * 1.0, rel=1e-6)


def test_gradients_are_summed_over_all_spans_of_all_replicas() -> None:
    all_reduces = tuple(AllReduceCost(ranks=ranks, latency=float(ranks), bandwidth=1e18) for ranks in (2, 4))
    costs = CostModel(EQUAL.model_copy(update={"all_reduces": all_reduces}))
    for layout, ranks in ((Layout(spans=2), 2), (Layout(replicas=2, spans=2), 4)):
        assert predict(costs, LOAD, layout, Cluster(ranks)).all_reduce == pytest.approx(ranks)


def test_a_span_has_all_weights_and_the_activations_of_its_own_time() -> None:
    costs = CostModel(bidirectional(profile([kind(saved=1e6, weight_bytes=10**6)] * 4, communicator_bytes=1e8)))
    one = predict(costs, LOAD, Layout(), Cluster(1)).stages[0].memory
    for stage in predict(costs, LOAD, Layout(spans=2), Cluster(2)).stages:
        assert stage.memory.weights == one.weights == 4e6 and stage.runs == ((0, 4),)
        assert stage.memory.activations == pytest.approx(one.activations / 2, rel=1e-3)
        assert stage.memory.communicators == 4e8, "all ranks, the weights' copies, and two for the neighbor"
    recomputed = predict(costs, LOAD, Layout(spans=2, recompute=True), Cluster(2))
    assert recomputed.memory < predict(costs, LOAD, Layout(spans=2), Cluster(2)).memory
    assert recomputed.seconds > predict(costs, LOAD, Layout(spans=2), Cluster(2)).seconds


def test_a_loss_over_whole_rows_is_one_more_action_of_all_spans() -> None:
    loss = kind(4.0, 8.0)
    drawn = EQUAL.model_copy(update={"loss": loss, "row_loss": True})
    timeline = predict_timeline(CostModel(drawn), LOAD, Layout(spans=2, micro_batches=2), Cluster(2))
    heads = [timed for timed in timeline.timed_actions if timed.action.kind is ActionKind.HEAD]
    # Two spans, two micro-batches; each span has two of a micro-batch's four rows, over all time.
    assert [timed.stop - timed.start for timed in heads] == pytest.approx([12.0 / 4] * 4)


@pytest.mark.parametrize("has_sweeps", [bidirectional, affine])
@pytest.mark.parametrize("row_loss", [False, True])
def test_the_last_block_adds_to_its_gradient_once_per_further_micro_batch(
    has_sweeps: Callable[[Profile, int], Profile], row_loss: bool
) -> None:
    def busy(accumulate: float, micro_batches: int) -> list[float]:
        kinds = [kind(0.1, 0.2), kind(0.1, 0.2), kind(0.1, 0.2, accumulate=accumulate)]
        drawn = has_sweeps(profile(kinds, intra_node=FREE), 2).model_copy(update={"row_loss": row_loss})
        layout = Layout(spans=2, micro_batches=micro_batches)
        return [stage.busy for stage in predict(CostModel(drawn), LOAD, layout, Cluster(2)).stages]

    for micro_batches in (1, 2, 4):
        extra = [more - less for more, less in zip(busy(5.0, micro_batches), busy(0.0, micro_batches), strict=True)]
        assert extra == pytest.approx([5.0 * (micro_batches - 1)] * 2)


@pytest.mark.parametrize("has_sweeps", [bidirectional, affine])
def test_recomputation_runs_every_forward_again_but_not_that_of_the_loss(
    has_sweeps: Callable[[Profile, int], Profile],
) -> None:
    def busy(recompute: bool, row_loss: bool) -> float:
        drawn = has_sweeps(profile([kind(1.0, 2.0), kind(10.0, 20.0)], intra_node=FREE), 1)
        drawn = drawn.model_copy(update={"row_loss": row_loss, "loss": kind(4.0, 8.0)})
        return predict(CostModel(drawn), LOAD, Layout(spans=2, recompute=recompute), Cluster(2)).stages[0].busy

    overhead = AFFINE_OVERHEAD if has_sweeps is affine else 1.0
    assert busy(True, row_loss=False) - busy(False, row_loss=False) == pytest.approx(overhead * 0.5)
    # The last block waits for a loss over whole rows, so it is recomputed too.
    assert busy(True, row_loss=True) - busy(False, row_loss=True) == pytest.approx(overhead * 0.5 + 5.0)


def test_only_affine_models_have_more_than_16_spans_and_deep_ones_have_fewer() -> None:
    def most_spans(drawn: Profile) -> int:
        load = Workload([[1024] * 4])
        return max(layout.spans for layout in CandidateLayouts(drawn, load, Cluster(512)))

    layers = [kind(0.1, 0.2)] * 2
    assert most_spans(bidirectional(profile(layers))) == 16
    assert most_spans(affine(profile(layers))) == 512
    assert most_spans(affine(profile(layers * 16))) == 32
    assert most_spans(affine(profile(layers)).model_copy(update={"row_loss": True})) == 16
    # With a layer that passes its state through the time of each span, all wait for it.
    mixed = affine(profile(layers))
    last = mixed.sweeps[-1].model_copy(update={"layer": 6, "passes_state": True})
    assert most_spans(mixed.model_copy(update={"sweeps": (*mixed.sweeps, last)})) == 16


def test_the_search_finds_spans_where_they_win() -> None:
    # A chunk with half the rows takes as long as one with all, so replicas gain nothing.
    rows_are_free = profile([kind(0, 0, start=0.1)] * 4)
    points = tuple(
        point.model_copy(update={"forward": 0.1 * point.steps / 16, "backward": 0.2 * point.steps / 16})
        for point in rows_are_free.kinds["0"].points
    )
    kinds = {name: one.model_copy(update={"points": points}) for name, one in rows_are_free.kinds.items()}
    latency_bound = bidirectional(rows_are_free.model_copy(update={"kinds": kinds}))
    plan = find_plan(latency_bound, LOAD, Cluster(2))
    assert plan.chosen.layout.spans == 2 and plan.speed_up(plan.chosen) > 1.9
    assert plan.chosen.layout.name == "2 spans"
    without = find_plan(latency_bound, Workload([[16] * 8], is_causal=False, can_cut_time=False), Cluster(2))
    assert all(one.layout.spans == 1 for one in without.best)


def test_spans_that_the_engine_refuses_are_never_proposed() -> None:
    causal = find_plan(profile([kind(0.1, 0.2)] * 4), Workload.of(8, 16), Cluster(4), num_best=100)
    assert all(one.layout.spans == 1 for one in causal.best)
    both = find_plan(EQUAL, LOAD, Cluster(4), num_best=100)
    assert {one.layout.spans for one in both.best} == {1, 2, 3, 4}
    for one in both.best:
        assert one.layout.spans == 1 or (one.layout.stages, one.layout.chunks, one.layout.interleave) == (1, 1, 1)
    short = find_plan(EQUAL, Workload([[2] * 8], is_causal=False), Cluster(4), num_best=100)
    assert max(one.layout.spans for one in short.best) == 2, "a span has at least one time step"
    with pytest.raises(PlanError, match=r"layout\.spans=2 is for models with bidirectional or affine blocks"):
        balance(profile([kind()] * 4), LOAD, Cluster(2), Layout(spans=2))
    assert balance(EQUAL, LOAD, Cluster(2), Layout(spans=2)).spans == 2
    with pytest.raises(PlanError, match=r"too small for 2 spans; use more spans or micro-batches"):
        balance(EQUAL, LOAD, Cluster(2, memory=1.0), Layout(spans=2))


def test_a_model_has_the_sweeps_that_the_engine_runs() -> None:
    with torch.device("meta"):
        model = Stack([Dropout(0.1), BidirectionalLSTM(8, 4), BidirectionalGRU(8, 4), LSTM(8, 6), Linear(6, 3)])
        own = Stack([BidirectionalLSTM(8, 4)])
        causal = Stack([LSTM(8, 4)])
    sweeps = [(sweep.block, sweep.layer, sweep.is_reverse, sweep.state_bytes) for sweep in find_sweeps(model)]
    # Bytes of float32: an LSTM has two tensors, a GRU has one.
    assert sweeps == [(1, 0, False, 32), (1, 0, True, 32), (2, 1, False, 16), (2, 1, True, 16), (3, 2, False, 48)]
    executed = [(sweep.layer, sweep.is_reverse) for sweep in SpanProgram.of(model).sweeps]
    assert [(layer, is_reverse) for _, layer, is_reverse, _ in sweeps] == executed
    assert len(find_sweeps(own)) == 2 and find_sweeps(causal) == ()
    assert find_span_obstacle(own) is find_span_obstacle(causal) is None


def test_affine_blocks_run_on_all_spans_at_once() -> None:
    sweeps = find_sweeps(Stack([MinGRU(4, 4), MinGRU(4, 4)]))
    assert [(sweep.block, sweep.layer, sweep.passes_state) for sweep in sweeps] == [
        (0, 0, False), (0, 1, True), (0, 2, False), (1, 3, False), (1, 4, True), (1, 5, False),
    ]  # fmt: skip
    drawn = profile([kind(0.1, 0.2)] * 2, intra_node=FREE).model_copy(update={"sweeps": sweeps})
    assert affine(drawn).sweeps == sweeps
    costs, load = CostModel(drawn), Workload([[16] * 8])
    one, four = (predict(costs, load, Layout(spans=n), Cluster(n)) for n in (1, 4))
    assert one.seconds / four.seconds == pytest.approx(4 / AFFINE_OVERHEAD, rel=0.03)
    assert four.bubble < 0.1
    plan = find_plan(drawn, load, Cluster(4))
    assert any(prediction.layout.spans > 1 for prediction in plan.best)
    # Lanes carry their state from window to window, which spans can't.
    lanes = find_plan(drawn, Workload([[16] * 8], carries_state=True), Cluster(4))
    assert all(prediction.layout.spans == 1 for prediction in lanes.best)
