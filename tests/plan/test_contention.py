from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.plan.actions import Action
from stretto.plan.contention import simulate_contended
from stretto.plan.schedule import stage_schedule
from stretto.plan.timeline import simulate


def schedules(stages: int, micro_batches: int, chunks: int) -> list[list[Action]]:
    return [stage_schedule(stage, stages, micro_batches, chunks) for stage in range(stages)]


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 6), st.integers(0, 10**6))
def test_with_a_core_for_each_rank_it_is_the_plain_simulation(
    stages: int, micro_batches: int, chunks: int, seed: int
) -> None:
    random = Random(seed)
    costs: dict[tuple[int, Action], float] = {}

    def cost(stage: int, action: Action) -> float:
        return costs.setdefault((stage, action), random.uniform(0.1, 3))

    plain = simulate(schedules(stages, micro_batches, chunks), cost, lambda stage, action: 0.25)
    shared = simulate_contended(
        schedules(stages, micro_batches, chunks), cost, lambda stage, action: 0.25, lambda busy: 1.0
    )
    assert not shared.is_deadlock
    assert [(span.stage, span.action) for span in plain.timed_actions] == [
        (span.stage, span.action) for span in shared.timed_actions
    ]
    for one, other in zip(plain.timed_actions, shared.timed_actions, strict=True):
        assert (other.start, other.stop) == pytest.approx((one.start, one.stop))


@given(st.integers(1, 5), st.integers(1, 8), st.integers(1, 4))
def test_cores_do_no_more_than_they_can(stages: int, chunks: int, cores: int) -> None:
    def speed(busy: int) -> float:
        return min(1.0, cores / busy)

    timeline = simulate_contended(schedules(stages, 1, chunks), lambda s, a: 1.0, lambda s, a: 0.0, speed)
    work = 2 * stages * chunks
    assert timeline.seconds >= work / cores - 1e-9
    if cores == 1:
        # One core is never idle, however many take turns on it.
        assert timeline.seconds == pytest.approx(work)


def test_an_order_that_deadlocks_is_told() -> None:
    crossed = schedules(2, 1, 1)
    crossed[0].reverse()
    assert simulate_contended(crossed, lambda s, a: 1.0, lambda s, a: 0.0, lambda busy: 1.0).is_deadlock
