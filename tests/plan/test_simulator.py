from collections.abc import Callable
from itertools import accumulate, pairwise, product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.plan.actions import Action, ActionKind, dependencies
from stretto.plan.schedule import max_live_chunks, stage_schedule
from stretto.plan.simulator import simulate
from stretto.plan.timeline import Timeline


def schedules(stages: int, micro_batches: int, chunks: int) -> list[list[Action]]:
    return [stage_schedule(stage, stages, micro_batches, chunks) for stage in range(stages)]


def one_or_two(stage: int, action: Action) -> float:
    return 1.0 if action.kind is ActionKind.FORWARD else 2.0


def random_cost(random: Random) -> tuple[Callable[[int, Action], float], dict[tuple[int, Action], float]]:
    """A random but fixed cost for each action, and the costs that were used so far."""
    costs: dict[tuple[int, Action], float] = {}
    return lambda stage, action: costs.setdefault((stage, action), random.uniform(0.1, 3)), costs


def peak_live_chunks(timeline: Timeline, stage: int) -> int:
    """The most forwards of a stage whose backward has not run."""
    kinds = [timed.action.kind for timed in timeline.timed_actions if timed.stage == stage]
    return max(accumulate(1 if kind is ActionKind.FORWARD else -1 for kind in kinds))


def test_no_schedule_deadlocks_even_if_sends_block() -> None:
    for stages, micro_batches, chunks in product(range(1, 9), range(1, 9), range(1, 17)):
        timeline = simulate(schedules(stages, micro_batches, chunks), one_or_two, blocking=True)
        assert not timeline.stuck, (stages, micro_batches, chunks)
        assert len(timeline.timed_actions) == 2 * stages * micro_batches * chunks


def test_a_deadlock_is_found_and_explained() -> None:
    crossed = schedules(2, 2, 1)
    # Stage 1 wants the second micro-batch first; stage 0 sends it only when it has the first micro-batch's gradient.
    crossed[0] = [Action(ActionKind.FORWARD, 0, 0), Action(ActionKind.BACKWARD, 0, 0), Action(ActionKind.FORWARD, 1, 0)]
    crossed[1] = [Action(ActionKind.FORWARD, 1, 0), Action(ActionKind.FORWARD, 0, 0), Action(ActionKind.BACKWARD, 0, 0)]
    for timeline in (simulate(crossed, one_or_two), simulate(crossed, one_or_two, speed=lambda num_busy: 0.5)):
        assert timeline.stuck == ("stage 0 waits to receive B0.0", "stage 1 waits to receive F1.0")


def test_a_deadlock_of_blocking_sends_names_the_send() -> None:
    # Stage 1 has one receive posted, and posts the next only after its first action, which never comes.
    stuck = [
        [Action(ActionKind.FORWARD, index, 0) for index in range(3)],
        [Action(ActionKind.FORWARD, 2, 0), Action(ActionKind.FORWARD, 0, 0), Action(ActionKind.FORWARD, 1, 0)],
    ]
    assert not simulate(stuck, one_or_two).stuck
    timeline = simulate(stuck, one_or_two, blocking=True)
    assert timeline.stuck == ("stage 0 waits to send F1.0", "stage 1 waits to receive F2.0")


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 8))
def test_efficiency_is_what_the_design_says(stages: int, micro_batches: int, chunks: int) -> None:
    timeline = simulate(schedules(stages, micro_batches, chunks), one_or_two)
    work = micro_batches * chunks
    assert timeline.seconds == pytest.approx(3 * (work + stages - 1))
    assert timeline.bubble == pytest.approx(1 - work / (work + stages - 1))
    for stage in range(stages):
        assert peak_live_chunks(timeline, stage) == max_live_chunks(stage, stages, micro_batches, chunks)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 5), st.randoms(use_true_random=False), st.booleans())
def test_nothing_starts_before_its_message_has_arrived(
    stages: int, micro_batches: int, chunks: int, random: Random, blocking: bool
) -> None:
    cost, costs = random_cost(random)
    timeline = simulate(schedules(stages, micro_batches, chunks), cost, lambda stage, action: 0.25, blocking=blocking)
    stop = {(timed.stage, timed.action): timed.stop for timed in timeline.timed_actions}
    for timed in timeline.timed_actions:
        assert timed.stop - timed.start == pytest.approx(costs[timed.stage, timed.action])
        for stage, action in dependencies(timed.action, timed.stage, stages, chunks):
            assert timed.start >= stop[stage, action] + (0.25 if stage != timed.stage else 0) - 1e-9
    for stage in range(stages):
        times = sorted((timed.start, timed.stop) for timed in timeline.timed_actions if timed.stage == stage)
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(times))


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 6), st.randoms(use_true_random=False))
def test_at_twice_the_speed_every_action_takes_half_the_time(
    stages: int, micro_batches: int, chunks: int, random: Random
) -> None:
    cost, _ = random_cost(random)
    plain = simulate(schedules(stages, micro_batches, chunks), cost)
    fast = simulate(schedules(stages, micro_batches, chunks), cost, speed=lambda num_busy: 2.0)
    half = [(timed.stage, timed.action, timed.start / 2, timed.stop / 2) for timed in plain.timed_actions]
    assert [timed[:2] for timed in fast.timed_actions] == [timed[:2] for timed in half]
    for timed, expected in zip(fast.timed_actions, half, strict=True):
        assert timed[2:] == pytest.approx(expected[2:])


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 6), st.randoms(use_true_random=False))
def test_with_a_core_for_each_stage_contention_changes_nothing(
    stages: int, micro_batches: int, chunks: int, random: Random
) -> None:
    cost, _ = random_cost(random)
    plain = simulate(schedules(stages, micro_batches, chunks), cost, lambda stage, action: 0.25)
    contended = simulate(
        schedules(stages, micro_batches, chunks),
        cost,
        lambda stage, action: 0.25,
        speed=lambda num_busy: min(1.0, stages / num_busy),
    )
    assert contended == plain


@given(st.integers(1, 5), st.integers(1, 8), st.integers(1, 4))
def test_cores_do_no_more_than_they_can(stages: int, chunks: int, cores: int) -> None:
    timeline = simulate(
        schedules(stages, 1, chunks), lambda stage, action: 1.0, speed=lambda num_busy: min(1.0, cores / num_busy)
    )
    work = 2 * stages * chunks
    assert timeline.seconds >= work / cores - 1e-9
    if cores == 1:
        # One core is never idle, however many stages share it.
        assert timeline.seconds == pytest.approx(work)


def test_two_stages_that_share_a_core_take_twice_as_long_while_both_compute() -> None:
    actions = [Action(ActionKind.FORWARD, 0, chunk) for chunk in range(2)]
    overlapping = simulate(
        [actions, actions], lambda stage, action: 1.0, speed=lambda num_busy: 1 / num_busy
    ).timed_actions
    # Stage 0 runs its first chunk alone; its second shares the core with stage 1's first; stage 1's second is alone.
    assert [(timed.stage, timed.start, timed.stop) for timed in overlapping] == [
        (0, 0.0, 1.0), (0, 1.0, 3.0), (1, 1.0, 3.0), (1, 3.0, 4.0),
    ]  # fmt: skip


def test_the_slowest_stage_sets_the_pace() -> None:
    even = simulate(schedules(2, 1, 16), lambda stage, action: 1.0)
    uneven = simulate(schedules(2, 1, 16), lambda stage, action: 0.5 if stage else 1.5)
    assert uneven.seconds > 1.4 * even.seconds
