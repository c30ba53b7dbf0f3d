from itertools import pairwise, product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.plan.actions import Action, ActionKind, dependencies
from stretto.plan.draw import draw_text
from stretto.plan.schedule import max_live_chunks, stage_schedule
from stretto.plan.timeline import Timeline, simulate


def schedules(stages: int, micro_batches: int, chunks: int) -> list[list[Action]]:
    return [stage_schedule(stage, stages, micro_batches, chunks) for stage in range(stages)]


def one_or_two(stage: int, action: Action) -> float:
    return 1.0 if action.kind is ActionKind.FORWARD else 2.0


def test_no_order_deadlocks_even_if_sends_block() -> None:
    for stages, micro_batches, chunks in product(range(1, 9), range(1, 9), range(1, 17)):
        timeline = simulate(schedules(stages, micro_batches, chunks), one_or_two, blocking=True)
        assert not timeline.is_deadlock, (stages, micro_batches, chunks, timeline.stuck)
        assert len(timeline.timed_actions) == 2 * stages * micro_batches * chunks


def test_a_deadlock_is_found_and_told() -> None:
    crossed = schedules(2, 2, 1)
    # Stage 1 wants the second micro-batch first; stage 0 sends it only when it has the first micro-batch's gradient.
    crossed[0] = [Action(ActionKind.FORWARD, 0, 0), Action(ActionKind.BACKWARD, 0, 0), Action(ActionKind.FORWARD, 1, 0)]
    crossed[1] = [Action(ActionKind.FORWARD, 1, 0), Action(ActionKind.FORWARD, 0, 0), Action(ActionKind.BACKWARD, 0, 0)]
    timeline = simulate(crossed, one_or_two)
    assert timeline.is_deadlock
    assert timeline.stuck == ("stage 0 waits to receive B0.0", "stage 1 waits to receive F1.0")


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 8))
def test_efficiency_is_what_the_design_says(stages: int, micro_batches: int, chunks: int) -> None:
    timeline = simulate(schedules(stages, micro_batches, chunks), one_or_two)
    work = micro_batches * chunks
    assert timeline.seconds == pytest.approx(3 * (work + stages - 1))
    assert timeline.bubble == pytest.approx(1 - work / (work + stages - 1))
    for stage in range(stages):
        assert timeline.peak_live_chunks(stage) == max_live_chunks(stage, stages, micro_batches, chunks)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 5), st.randoms(use_true_random=False), st.booleans())
def test_nothing_starts_before_what_it_needs_has_arrived(
    stages: int,
    micro_batches: int,
    chunks: int,
    random: Random,
    blocking: bool,
) -> None:
    costs: dict[tuple[int, Action], float] = {}

    def cost(stage: int, action: Action) -> float:
        return costs.setdefault((stage, action), random.uniform(0.1, 3))

    timeline = simulate(schedules(stages, micro_batches, chunks), cost, lambda stage, action: 0.25, blocking=blocking)
    stop = {(span.stage, span.action): span.stop for span in timeline.timed_actions}
    for span in timeline.timed_actions:
        assert span.stop - span.start == pytest.approx(costs[span.stage, span.action])
        for stage, action in dependencies(span.action, span.stage, stages, chunks):
            assert span.start >= stop[stage, action] + (0.25 if stage != span.stage else 0) - 1e-9
    for stage in range(stages):
        own = sorted((span.start, span.stop) for span in timeline.timed_actions if span.stage == stage)
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(own))


def test_the_slowest_stage_sets_the_pace() -> None:
    even = simulate(schedules(2, 1, 16), lambda stage, action: 1.0)
    uneven = simulate(schedules(2, 1, 16), lambda stage, action: 0.5 if stage else 1.5)
    assert uneven.seconds > 1.4 * even.seconds


def test_the_drawing_is_the_picture_of_the_design() -> None:
    timeline = simulate(schedules(3, 1, 4), lambda stage, action: 1.0)
    assert draw_text(timeline, width=36).splitlines() == [
        "stage 0   F0-F1-F2-F3-............B3-B2-B1-B0-",
        "stage 1   ...F0-F1-F2-F3-......B3-B2-B1-B0-...",
        "stage 2   ......F0-F1-F2-F3-B3-B2-B1-B0-......",
    ]
    assert draw_text(Timeline(1, ()), 10) == "stage 0   .........."
