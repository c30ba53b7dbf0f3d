"""Schedules with a head that is split over all stages: each stage computes its part of the logits of every chunk.

One micro-batch of three chunks over two stages. HG is the head's forward and backward, together, so no logits are kept:

    stage 0  F0 F1 HG0 F2 HG1 .  HG2 .  B2 B1 B0
    stage 1  .  F0 HG0 F1 HG1 F2 HG2 B2 B1 B0

All stages run the head of the same chunk at the same time, because they exchange the maximum and the sum of each row of
logits. So a schedule consists of rounds: in each, a stage runs at most one forward, one head and one backward. A stage
is one forward ahead of the next stage, and one backward behind it; no stage waits for a message of the same round.
"""

from collections.abc import Sequence

from stretto.plan.actions import Action, ActionKind

Round = tuple[Action, ...]
"""Some of: a forward, a head and its gradient, a backward; in this order."""


def head_rounds(stage: int, num_stages: int, chunk_counts: Sequence[int], *, has_backward: bool = True) -> list[Round]:
    """Return the rounds of one stage for one step; `chunk_counts` has the number of chunks of each micro-batch."""
    forwards = [(index, chunk) for index, count in enumerate(chunk_counts) for chunk in range(count)]
    backwards = [(index, chunk) for index, count in enumerate(chunk_counts) for chunk in reversed(range(count))]
    lag = num_stages - 1 - stage
    first_backward = 2 * lag + max(chunk_counts) - 1 if has_backward else len(forwards) + lag
    rounds = []
    for number in range(first_backward + len(backwards) * has_backward):
        actions = [Action(ActionKind.FORWARD, *forwards[number])] if number < len(forwards) else []
        if 0 <= number - lag < len(forwards):
            head = forwards[number - lag]
            actions += [Action(ActionKind.HEAD, *head), Action(ActionKind.HEAD_GRADIENT, *head)]
        if has_backward and number >= first_backward:
            actions.append(Action(ActionKind.BACKWARD, *backwards[number - first_backward]))
        rounds.append(tuple(actions))
    return rounds


def receives_before_head(rounds: Sequence[Round]) -> dict[Action, set[ActionKind]]:
    """Return, by head, for which messages that come after it a neighbor sends before its own head of that chunk.

    They are those of the backward of the same round, and of the forward of the next one.
    """
    kinds: dict[Action, set[ActionKind]] = {}
    for this, following in zip(rounds, [*rounds[1:], ()], strict=True):
        later = [action for action in this if action.kind is ActionKind.BACKWARD]
        later += [action for action in following if action.kind is ActionKind.FORWARD]
        for action in this:
            if action.kind is ActionKind.HEAD:
                kinds[action] = {other.kind for other in later}
    return kinds


def head_schedule(stage: int, num_stages: int, chunk_counts: Sequence[int]) -> list[Action]:
    """Return the actions of one stage for one training step, in order."""
    return [action for round_ in head_rounds(stage, num_stages, chunk_counts) for action in round_]


def max_live_chunks_with_head(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int) -> int:
    """Return how many chunks can await backward: `num_chunks` plus two per later stage, at most all."""
    return min(num_chunks + 2 * (num_stages - 1 - stage), num_micro_batches * num_chunks)
