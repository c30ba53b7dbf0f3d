from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.profiles import kind, profile, with_fixed_cost
from stretto import Layout
from stretto.plan.actions import Action, ActionKind
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.draw import draw_text
from stretto.plan.one_layout import balance
from stretto.plan.partition import interleaved_partition, look_ahead_share
from stretto.plan.predict import predict, predict_timeline
from stretto.plan.run_chain import ChainMessages, RunChain, cut_at_look_ahead
from stretto.plan.schedule import chain_schedule
from stretto.plan.search import find_plan
from stretto.plan.simulator import simulate
from stretto.plan.timeline import Timeline
from stretto.plan.workload import Workload


def schedules(chain: RunChain, micro_batches: int, chunks: int) -> list[list[Action]]:
    return [chain_schedule(chain, stage, micro_batches, chunks) for stage in range(chain.num_stages)]


def one_or_two(stage: int, action: Action) -> float:
    return 1.0 if action.kind is ActionKind.FORWARD else 2.0


def check_dependencies(chain: RunChain, micro_batches: int, chunks: int, timeline: Timeline) -> None:
    """Check that nothing starts before what it needs has stopped."""
    messages = ChainMessages(chain, [chunks] * micro_batches)
    stop = {(timed.stage, timed.action): timed.stop for timed in timeline.timed_actions}
    for timed in timeline.timed_actions:
        for stage, action in messages.dependencies(timed.action, timed.stage):
            assert timed.start >= stop[stage, action] - 1e-9


def test_chunks_pass_interleaved_stages_in_groups() -> None:
    first, second = schedules(RunChain.of(2, 2), 1, 4)
    forwards = "F0.0 F0.1 F0.0b F0.1b F0.2 F0.3 F0.2b F0.3b"
    backwards = "B0.3b B0.2b B0.3 B0.2 B0.1b B0.0b B0.1 B0.0"
    assert " ".join(map(str, first)) == " ".join(map(str, second)) == f"{forwards} {backwards}"


@given(st.integers(2, 5), st.integers(2, 4), st.integers(1, 3), st.integers(1, 3))
def test_interleaved_stages_wait_as_little_as_the_design_says(
    stages: int, interleave: int, micro_batches: int, groups: int
) -> None:
    chain, chunks = RunChain.of(stages, interleave), groups * stages
    timeline = simulate(schedules(chain, micro_batches, chunks), one_or_two, chain=chain)
    work = interleave * micro_batches * chunks
    assert timeline.bubble == pytest.approx((stages - 1) / (work + stages - 1))
    check_dependencies(chain, micro_batches, chunks, timeline)


def check_interleaved(sizes: tuple[int, int, int, int]) -> None:
    stages, interleave, micro_batches, chunks = sizes
    chain = RunChain.of(stages, interleave)
    timeline = simulate(schedules(chain, micro_batches, chunks), one_or_two, blocking=True, chain=chain)
    assert not timeline.stuck, sizes
    assert len(timeline.timed_actions) == 2 * stages * interleave * micro_batches * chunks


def test_no_interleaved_schedule_deadlocks_even_if_sends_block() -> None:
    for sizes in product((2, 3, 5), (2, 3), (1, 2, 5), (1, 2, 3, 7)):
        check_interleaved(sizes)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_interleaved_schedule_of_any_size_deadlocks() -> None:
    for sizes in product(range(2, 9), range(2, 5), range(1, 9), range(1, 17)):
        check_interleaved(sizes)


@st.composite
def look_ahead_chains(draw: st.DrawFn) -> tuple[RunChain, list[slice]]:
    stages = draw(st.integers(1, 5))
    counts = draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    looks_ahead = draw(st.lists(st.booleans(), min_size=sum(counts), max_size=sum(counts)))
    edges = [sum(counts[:index]) for index in range(stages + 1)]
    parts = [slice(edges[index], edges[index + 1]) for index in range(stages)]
    return cut_at_look_ahead(parts, looks_ahead, stages)


@given(look_ahead_chains(), st.integers(1, 4), st.integers(1, 6), st.booleans(), st.randoms(use_true_random=False))
def test_no_schedule_around_blocks_that_look_ahead_deadlocks(
    chain_and_parts: tuple[RunChain, list[slice]], micro_batches: int, chunks: int, blocking: bool, random: Random
) -> None:
    chain, parts = chain_and_parts
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    costs: dict[tuple[int, Action], float] = {}
    timeline = simulate(
        schedules(chain, micro_batches, chunks),
        lambda stage, action: costs.setdefault((stage, action), random.uniform(0.1, 3)),
        blocking=blocking,
        chain=chain,
    )
    assert not timeline.stuck
    num_actions = sum(1 if whole else chunks for whole in chain.whole)
    assert len(timeline.timed_actions) == 2 * micro_batches * num_actions
    check_dependencies(chain, micro_batches, chunks, timeline)


def test_only_the_blocks_between_those_that_look_ahead_wait_with_them() -> None:
    parts = [slice(0, 3), slice(3, 6), slice(6, 8)]
    chain, blocks = cut_at_look_ahead(parts, [False, True, False, False, True, False, False, False], 3)
    # The first stage's blocks before it belong to the run that looks ahead: nobody waits for them.
    assert [(part.start, part.stop) for part in blocks] == [(0, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 8)]
    assert chain == RunChain((0, 0, 1, 1, 1, 2), (True, False, False, True, False, False))


GNMT = profile([kind(2e-3, 4e-3), *[kind()] * 7]).model_copy(update={"look_ahead_blocks": (0,)})


# The figures are those of docs/concepts/wavefront.md.
@pytest.mark.parametrize(
    ("fixed_share", "stages", "gain"),
    [(0, 2, 1.05), (0, 3, 1.15), (0, 4, 1.07), (0.5, 2, 1.49), (0.5, 3, 1.78), (0.5, 4, 2.21)],
)
def test_chunks_around_a_bidirectional_layer_are_predicted_to_be_faster_than_micro_batches_alone(
    fixed_share: float, stages: int, gain: float
) -> None:
    costs = GNMT.model_copy(
        update={"kinds": {name: with_fixed_cost(one, fixed_share) for name, one in GNMT.kinds.items()}}
    )
    workload, cluster = Workload([[64] * 8], is_causal=False), Cluster(stages)
    (best,) = [one for one in find_plan(costs, workload, cluster, uses_all=True).best if one.layout.stages == stages]
    assert best.layout.chunks > 1
    layouts = [Layout(stages=stages, micro_batches=micro_batches) for micro_batches in (1, 2, 4, 8)]
    balanced = [balance(costs, workload, cluster, layout) for layout in layouts]
    one_chunk = min(predict(CostModel(costs), workload, layout, cluster).seconds for layout in balanced)
    assert one_chunk / best.seconds == pytest.approx(gain, abs=0.005)


def test_a_plan_around_a_bidirectional_layer_is_drawn() -> None:
    workload, cluster = Workload([[64] * 8], is_causal=False), Cluster(2)
    layout = Layout(stages=2, chunks=4, blocks=(4, 4))
    timeline = predict_timeline(CostModel(GNMT), workload, layout, cluster)
    first, second = draw_text(timeline).splitlines()
    assert first.split()[2].startswith("F0-") and "F3b" in first and "b" not in second


def test_all_chunks_are_kept_around_a_block_that_looks_ahead() -> None:
    workload, costs = Workload([[64] * 8], is_causal=False), CostModel(GNMT)
    layout = Layout(stages=2, chunks=4, micro_batches=4, blocks=(4, 4))
    causal = predict(CostModel(profile([kind()] * 8)), workload, layout, Cluster(2))
    ahead = predict(costs, workload, layout, Cluster(2))
    # Without it, the last stage keeps the 4 chunks of one micro-batch; with it, those of all 4.
    assert ahead.stages[1].memory.activations == pytest.approx(4 * causal.stages[1].memory.activations)


def test_micro_batches_around_a_block_that_looks_ahead_save_memory_with_one_chunk_or_recompute() -> None:
    # Per time step, a layer saves ten times as many bytes as it sends.
    wide = profile([kind(2e-3, 4e-3, saved=20 * 128 * 8.0), *[kind(saved=10 * 128 * 8.0)] * 7])
    costs = CostModel(wide.model_copy(update={"look_ahead_blocks": (0,)}))
    workload = Workload([[64] * 8], is_causal=False)

    def activations(micro_batches: int, chunks: int, recompute: bool = False) -> float:
        layout = Layout(stages=2, micro_batches=micro_batches, chunks=chunks, recompute=recompute, blocks=(4, 4))
        return max(stage.memory.activations for stage in predict(costs, workload, layout, Cluster(2)).stages)

    whole = activations(1, 4)
    assert activations(4, 4) == pytest.approx(whole), "with chunks they save nothing"
    assert activations(4, 1) <= 0.51 * whole, "two micro-batches of four"
    assert activations(4, 4, recompute=True) < 0.4 * whole, "one of four, and the inputs of all"


def test_the_first_micro_batch_of_a_block_that_looks_ahead_overlaps_with_nothing() -> None:
    assert look_ahead_share(1) == 0 and look_ahead_share(4) == 0.75


def test_interleaved_stages_are_balanced_by_stage() -> None:
    parts = interleaved_partition([1.0, 1.0, 1.0, 3.0], 2, 2)
    assert [(part.start, part.stop) for part in parts] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    parts = interleaved_partition([4.0, 1.0, 1.0, 1.0, 1.0, 4.0], 2, 2)
    costs = [sum([4.0, 1.0, 1.0, 1.0, 1.0, 4.0][part]) for part in parts]
    assert sum(costs[::2]) == sum(costs[1::2]) == 6
