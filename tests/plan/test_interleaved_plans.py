"""Predictions and plans of interleaved stages: the time, the memory and the messages of the order that is executed."""

import pytest

from helpers.profiles import bidirectional, kind, profile
from stretto import Layout
from stretto.errors import PlanError
from stretto.plan.actions import ActionKind
from stretto.plan.candidates import CandidateLayouts
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.one_layout import balance
from stretto.plan.predict import predict, predict_timeline
from stretto.plan.profile import Link, TiedBlocks
from stretto.plan.run_chain import RunChain
from stretto.plan.schedule import chain_schedule
from stretto.plan.search import find_plan
from stretto.plan.workload import Workload

FREE = Link(latency=0.0, bandwidth=1e18)
LOAD = Workload.of(8, 16)


@pytest.mark.parametrize(
    ("stages", "interleave", "micro_batches", "chunks"), [(2, 2, 1, 8), (2, 4, 1, 4), (4, 2, 2, 8)]
)
def test_equal_runs_and_free_messages_give_the_bubble_of_the_formula(
    stages: int, interleave: int, micro_batches: int, chunks: int
) -> None:
    costs = CostModel(profile([kind(0.1, 0.2)] * 8, intra_node=FREE))
    layout = Layout(stages=stages, interleave=interleave, micro_batches=micro_batches, chunks=chunks)
    layout = layout.model_copy(update={"blocks": (8 // stages // interleave,) * (stages * interleave)})
    prediction = predict(costs, LOAD, layout, Cluster(stages))
    work = interleave * micro_batches * chunks
    assert prediction.bubble == pytest.approx((stages - 1) / (work + stages - 1))
    assert prediction.pipeline == pytest.approx(8 * 0.3 / stages * (work + stages - 1) / work)


def test_the_simulated_actions_are_those_that_the_engine_runs() -> None:
    layout = Layout(stages=2, interleave=2, micro_batches=2, chunks=3, blocks=(1, 1, 1, 1))
    timeline = predict_timeline(CostModel(profile([kind()] * 4)), LOAD, layout, Cluster(2))
    for stage in range(2):
        actions = [timed.action for timed in timeline.timed_actions if timed.stage == stage]
        assert actions == chain_schedule(RunChain.of(2, 2), stage, 2, 3)


def test_messages_cost_as_much_as_their_links_on_every_pass() -> None:
    # Blocks that take no time worth naming: the step is the way of one chunk there and back, and nothing else.
    link = Link(latency=1.0, bandwidth=1e18)
    costs = CostModel(profile([kind(1e-9, 1e-9)] * 4, intra_node=link, inter_node=Link(latency=5.0, bandwidth=1e18)))
    layout = Layout(stages=2, interleave=2, blocks=(1, 1, 1, 1))
    assert predict(costs, LOAD, layout, Cluster(2)).pipeline == pytest.approx(2 * 3 * 1.0)
    assert predict(costs, LOAD, layout, Cluster(2, 2)).pipeline == pytest.approx(2 * 3 * 5.0)
    # Three stages on nodes of two: the way back from the last to the first crosses nodes, as does that to the last.
    three = Layout(stages=3, interleave=2, blocks=(1, 1, 1, 1, 1, 1))
    costs = CostModel(profile([kind(1e-9, 1e-9)] * 6, intra_node=link, inter_node=Link(latency=5.0, bandwidth=1e18)))
    assert predict(costs, LOAD, three, Cluster(4, 2)).pipeline == pytest.approx(2 * (1 + 5 + 5 + 1 + 5))


def test_a_stage_sends_the_outputs_of_each_of_its_runs() -> None:
    costs = CostModel(profile([kind(output_bytes=10.0**index, weight_bytes=0) for index in range(4)]))
    plain, interleaved = (
        predict(costs, LOAD, Layout(stages=2, interleave=len(blocks) // 2, chunks=4, blocks=blocks), Cluster(2))
        for blocks in ((2, 2), (1, 1, 1, 1))
    )
    tokens = 8 * 16
    assert plain.traffic == pytest.approx(10 * tokens)
    # Stage 0 sends the activations of blocks 0 and 2, and the gradient of block 1's.
    assert interleaved.traffic == pytest.approx((1 + 100 + 10) * tokens)


def held_chunks(layout: Layout, stage: int) -> int:
    """The most chunks that a stage holds at a time, counted in the schedule that the engine runs."""
    most = held = 0
    chain = RunChain.of(layout.stages, layout.interleave)
    for action in chain_schedule(chain, stage, layout.micro_batches, layout.chunks):
        held += 1 if action.kind is ActionKind.FORWARD else -1
        most = max(most, held)
    return most


@pytest.mark.parametrize(("micro_batches", "chunks", "recompute"), [(1, 4, False), (4, 2, False), (3, 5, True)])
def test_memory_is_that_of_the_chunks_that_the_schedule_holds(micro_batches: int, chunks: int, recompute: bool) -> None:
    costs = CostModel(profile([kind(saved=1e6, output_bytes=100.0)] * 4))
    layout = Layout(stages=2, interleave=2, micro_batches=micro_batches, chunks=chunks, blocks=(1, 1, 1, 1))
    layout = layout.model_copy(update={"recompute": recompute})
    rows, steps = LOAD.largest_chunk(1, micro_batches, chunks)
    saved, state, inputs = 1e6 * rows * steps / 128, 16 * rows, 100 * rows * steps
    for stage, prediction in enumerate(predict(costs, LOAD, layout, Cluster(2)).stages):
        assert prediction.memory.weights == 2000
        held = held_chunks(layout, stage)
        if not recompute:
            assert prediction.memory.activations == pytest.approx(held * (saved + state))
            continue
        # The first run's inputs are those of the window, which exist anyway.
        assert prediction.memory.activations <= held * (inputs + state) + saved + 1
        assert prediction.memory.activations > saved + held * state


def test_tied_weights_of_interleaved_stages_are_summed_between_the_stages_that_hold_them() -> None:
    tied = (TiedBlocks(blocks=(0, 3), weight_bytes=10**6),)
    kinds = [kind(weight_bytes=10**6)] * 4
    layout = Layout(stages=2, interleave=2, chunks=2, blocks=(1, 1, 1, 1))
    without, with_ties = (
        predict(CostModel(profile(kinds, tied=ties)), LOAD, layout, Cluster(2)) for ties in ((), tied)
    )
    assert with_ties.all_reduce > without.all_reduce == 0


def test_the_search_finds_interleaved_stages_where_they_win() -> None:
    # Each chunk costs a lot by itself, so there should be few; replicas would send large gradients.
    slow = Link(latency=1e-6, bandwidth=1e9)
    deep = profile([kind(0.1, 0.2, start=0.02, weight_bytes=10**8)] * 8, intra_node=slow, memory=1e11)
    plan = find_plan(deep, LOAD, Cluster(4), uses_all=True)
    layout = plan.chosen.layout
    assert layout.is_interleaved and layout.stages == 4 and len(layout.blocks) == layout.num_runs
    assert layout.name.endswith(f", interleave {layout.interleave}")
    (plain,) = [one for one in plan.variants if not one.layout.is_interleaved]
    assert plan.chosen.seconds < 0.95 * plain.seconds
    assert balance(deep, LOAD, Cluster(4), layout).blocks == layout.blocks


def test_runs_are_balanced_by_stage_and_not_by_run() -> None:
    kinds = [kind(0.4, 0.8), *[kind(0.1, 0.2)] * 4, kind(0.4, 0.8)]
    layout = balance(profile(kinds), LOAD, Cluster(2), Layout(stages=2, interleave=2, chunks=4))
    busy = [stage.busy for stage in predict(CostModel(profile(kinds)), LOAD, layout, Cluster(2)).stages]
    assert busy[0] == pytest.approx(busy[1])


def test_interleaved_stages_that_the_engine_refuses_are_never_proposed() -> None:
    def interleaved(kinds: int, devices: int, is_ahead: bool = False, vocab_rows: int = 0) -> set[tuple[int, int]]:
        drawn = profile([kind(0.1, 0.2, start=0.02)] * kinds).model_copy(update={"vocab_rows": vocab_rows})
        if is_ahead:
            drawn = drawn.model_copy(update={"look_ahead_blocks": (0,)})
        workload = Workload([[16] * 8], is_causal=not is_ahead)
        layouts = list(CandidateLayouts(drawn, workload, Cluster(devices)))
        assert any(layout.vocab_parallel for layout in layouts) == (vocab_rows > 0)
        return {(layout.stages, layout.interleave) for layout in layouts if layout.interleave > 1}

    assert interleaved(8, 4, vocab_rows=100) == {(2, 2), (2, 3), (2, 4), (3, 2), (4, 2)}
    assert not interleaved(3, 4), "three blocks are not four runs"
    assert interleaved(6, 3) == {(2, 2), (2, 3), (3, 2)}
    assert not interleaved(8, 4, is_ahead=True)
    with pytest.raises(PlanError, match=r"layout\.interleave=2 needs causal blocks, but block 0 looks ahead"):
        balance(bidirectional(profile([kind()] * 8)), LOAD, Cluster(2), Layout(stages=2, interleave=2))
    with pytest.raises(
        PlanError, match=r"layout\.stages=4 x layout\.interleave=2 exceeds the model's number of blocks"
    ):
        balance(profile([kind()] * 7), LOAD, Cluster(4), Layout(stages=4, interleave=2))
