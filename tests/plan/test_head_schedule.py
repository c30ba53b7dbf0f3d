"""The rounds of a head that is split over stages: executed, simulated and drawn."""

from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.plan.actions import Action, ActionKind, dependencies, receivers, senders
from stretto.plan.draw import draw_text
from stretto.plan.head_schedule import head_rounds, head_schedule, max_live_chunks_with_head, receives_before
from stretto.plan.simulator import simulate

HEADS = (ActionKind.HEAD, ActionKind.HEAD_GRADIENT)
LOOKUPS = (ActionKind.EMBEDDING, ActionKind.EMBEDDING_GRADIENT)
COSTS = {ActionKind.FORWARD: 1.0, ActionKind.BACKWARD: 2.0, ActionKind.HEAD: 3.0, ActionKind.HEAD_GRADIENT: 5.0}
COSTS |= {ActionKind.EMBEDDING: 0.5, ActionKind.EMBEDDING_GRADIENT: 0.25}
SIZES = st.tuples(st.integers(2, 6), st.lists(st.integers(1, 6), min_size=1, max_size=5))


def schedules(num_stages: int, chunk_counts: list[int], *, is_tied: bool = False) -> list[list[Action]]:
    return [head_schedule(stage, num_stages, chunk_counts, is_tied=is_tied) for stage in range(num_stages)]


def cost(stage: int, action: Action) -> float:
    return COSTS[action.kind]


def test_all_stages_run_the_head_of_a_chunk_at_the_same_time() -> None:
    timeline = simulate(schedules(2, [3]), cost)
    # Stage 1 waits for the first forward, and stage 0 for the last stage's first backward.
    assert timeline.seconds == 1 + 3 * (1 + 3 + 5) + 3 * 2 + 2
    assert draw_text(timeline, 72).splitlines()[1] == (
        "stage 1   ..F-H0----G0--------F-H1----G1--------F-H2----G2--------B2--B1--B0--...."
    )
    starts = {(timed.stage, timed.action): timed.start for timed in timeline.timed_actions}
    for chunk, kind in product(range(3), HEADS):
        assert starts[0, Action(kind, 0, chunk)] == starts[1, Action(kind, 0, chunk)]


@given(SIZES, st.booleans())
def test_every_action_runs_once_and_heads_in_one_order(sizes: tuple[int, list[int]], is_tied: bool) -> None:
    num_stages, chunk_counts = sizes
    chunks = [(index, chunk) for index, count in enumerate(chunk_counts) for chunk in range(count)]
    kinds = [kind for kind in ActionKind if is_tied or kind not in LOOKUPS]
    for actions in schedules(num_stages, chunk_counts, is_tied=is_tied):
        assert sorted(map(str, actions)) == sorted(str(Action(kind, *chunk)) for kind in kinds for chunk in chunks)
        for kind in (ActionKind.FORWARD, *HEADS, *LOOKUPS[: int(is_tied)]):
            assert [(a.micro_batch, a.chunk) for a in actions if a.kind is kind] == chunks


@given(SIZES)
def test_all_stages_exchange_in_one_order(sizes: tuple[int, list[int]]) -> None:
    """A communicator runs its operations in the order of their calls, which must be the same on every rank."""
    orders = [
        [action for action in actions if action.kind in (*HEADS, *LOOKUPS)]
        for actions in schedules(*sizes, is_tied=True)
    ]
    assert all(order == orders[0] for order in orders)


def test_a_lookup_is_a_round_ahead_of_its_forward_and_its_gradient_a_round_behind() -> None:
    first, last = schedules(2, [3], is_tied=True)
    # As drawn in the module's docstring.
    assert " ".join(f"{a.kind.value}{a.chunk}" for a in first) == (
        "E0 F0 E1 F1 H0 G0 E2 F2 H1 G1 H2 G2 B2 D2 B1 D1 B0 D0"
    )
    assert " ".join(f"{a.kind.value}{a.chunk}" for a in last) == (
        "E0 E1 F0 H0 G0 E2 F1 H1 G1 F2 H2 G2 B2 B1 D2 B0 D1 D0"
    )


@given(SIZES, st.booleans())
def test_a_stage_runs_its_own_dependencies_first(sizes: tuple[int, list[int]], is_tied: bool) -> None:
    num_stages, chunk_counts = sizes
    for stage, actions in enumerate(schedules(num_stages, chunk_counts, is_tied=is_tied)):
        done: set[Action] = set()
        for action in actions:
            num_chunks = chunk_counts[action.micro_batch]
            needs = dependencies(action, stage, num_stages, num_chunks, has_head=True, is_tied=is_tied)
            assert {need for where, need in needs if where == stage} <= done
            done.add(action)


@given(SIZES)
def test_live_chunks_are_bounded(sizes: tuple[int, list[int]]) -> None:
    num_stages, chunk_counts = sizes
    for stage, actions in enumerate(schedules(num_stages, chunk_counts)):
        live = peak = 0
        for action in actions:
            live += (action.kind is ActionKind.FORWARD) - (action.kind is ActionKind.BACKWARD)
            peak = max(peak, live)
        assert peak <= max_live_chunks_with_head(stage, num_stages, len(chunk_counts), max(chunk_counts))


@given(SIZES, st.booleans())
def test_messages_match_on_both_sides(sizes: tuple[int, list[int]], is_tied: bool) -> None:
    num_stages, chunk_counts = sizes
    stages = schedules(num_stages, chunk_counts, is_tied=is_tied)
    sent = {
        (stage, action, other, received)
        for stage, actions in enumerate(stages)
        for action in actions
        for other, received in receivers(action, stage, num_stages, has_head=True, is_tied=is_tied)
    }
    awaited = {
        (other, sender, stage, action)
        for stage, actions in enumerate(stages)
        for action in actions
        for other, sender in senders(action, stage, num_stages, has_head=True, is_tied=is_tied)
    }
    assert sent == awaited


@given(SIZES, st.randoms(use_true_random=False), st.booleans(), st.booleans())
def test_nothing_starts_before_its_messages_have_arrived(
    sizes: tuple[int, list[int]], random: Random, blocking: bool, is_tied: bool
) -> None:
    num_stages, chunk_counts = sizes
    costs: dict[tuple[int, Action], float] = {}
    timeline = simulate(
        schedules(num_stages, chunk_counts, is_tied=is_tied),
        lambda stage, action: costs.setdefault((stage, action), random.uniform(0.1, 3)),
        lambda stage, action: 0.25,
        blocking=blocking,
    )
    assert not timeline.stuck
    stop = {(timed.stage, timed.action): timed.stop for timed in timeline.timed_actions}
    assert len(stop) == (6 if is_tied else 4) * num_stages * sum(chunk_counts)
    for timed in timeline.timed_actions:
        num_chunks = chunk_counts[timed.action.micro_batch]
        for stage, action in dependencies(
            timed.action, timed.stage, num_stages, num_chunks, has_head=True, is_tied=is_tied
        ):
            assert timed.start >= stop[stage, action] + (0.25 if stage != timed.stage else 0) - 1e-9


@pytest.mark.parametrize(("num_stages", "chunk_counts"), [(2, [8]), (3, [6]), (2, [4, 4, 4]), (4, [4] * 6)])
def test_stages_wait_only_to_fill_and_drain(num_stages: int, chunk_counts: list[int]) -> None:
    timeline = simulate(schedules(num_stages, chunk_counts), cost)
    work = 11 * sum(chunk_counts)
    # The first forward and the last backward of each further stage, and once the same in the middle.
    assert timeline.seconds <= work + 2 * 3 * (num_stages - 1) + 1e-9


@given(SIZES, st.booleans())
def test_a_receive_is_posted_before_an_exchange_only_if_it_is_sent_before_it(
    sizes: tuple[int, list[int]], is_tied: bool
) -> None:
    num_stages, chunk_counts = sizes
    rounds = [head_rounds(stage, num_stages, chunk_counts, is_tied=is_tied) for stage in range(num_stages)]
    flat = [[action for round_ in stage_rounds for action in round_] for stage_rounds in rounds]
    for stage in range(num_stages):
        posted = dict.fromkeys((ActionKind.FORWARD, ActionKind.BACKWARD), 0)
        receives = receives_before(rounds[stage])
        for position, action in enumerate(flat[stage]):
            for kind in receives.get(action, ()):
                posted[kind] += 1
            if action.kind in posted:
                # What was not posted ahead is posted when it is needed.
                num_used = sum(other.kind is action.kind for other in flat[stage][: position + 1])
                posted[action.kind] = max(posted[action.kind], num_used)
                continue
            for kind, neighbor in ((ActionKind.FORWARD, stage - 1), (ActionKind.BACKWARD, stage + 1)):
                if 0 <= neighbor < num_stages:
                    sent = [a for a in flat[neighbor][: flat[neighbor].index(action)] if a.kind is kind]
                    assert len(sent) == posted[kind], "no message is pending while all stages wait"
