"""Schedules with a head that is split over all stages: each stage computes its part of the logits of every chunk.

One micro-batch of three chunks over two stages. HG is the head's forward and backward, together, so no logits are kept:

    stage 0  F0 F1 HG0 F2 HG1 .  HG2 .  B2 B1 B0
    stage 1  .  F0 HG0 F1 HG1 F2 HG2 B2 B1 B0

All stages run the head of the same chunk at the same time, because they exchange the maximum and the sum of each row of
logits. So a schedule consists of rounds: in each, a stage runs at most one forward, one head and one backward. A stage
is one forward ahead of the next stage, and one backward behind it; no stage waits for a message of the same round.

If the embedding uses the same table (tied weights), all stages look up the tokens of a chunk (E) one round before the
first stage's forward, and add the gradient of the vectors to their rows (D) one round after the first stage's backward:

    stage 0  E0 F0 E1 F1 HG0 E2 F2 HG1 .  HG2 .  B2 D2 B1 D1 B0 D0
    stage 1  E0 .  E1 F0 HG0 E2 F1 HG1 F2 HG2 B2 B1 D2 B0 D1 .  D0
"""

from collections.abc import Sequence

from stretto.plan.actions import Action, ActionKind

Round = tuple[Action, ...]
"""Some of: a forward, a head and its gradient, a lookup, the gradient of a lookup, a backward; in this order."""

_OF_ALL_STAGES = (
    ActionKind.HEAD,
    ActionKind.HEAD_GRADIENT,
    ActionKind.EMBEDDING,
    ActionKind.EMBEDDING_GRADIENT,
)


def head_rounds(
    stage: int, num_stages: int, chunk_counts: Sequence[int], *, has_backward: bool = True, is_tied: bool = False
) -> list[Round]:
    """Return the rounds of one stage for one step; `chunk_counts` has the number of chunks of each micro-batch."""
    forwards = [(index, chunk) for index, count in enumerate(chunk_counts) for chunk in range(count)]
    backwards = [(index, chunk) for index, count in enumerate(chunk_counts) for chunk in reversed(range(count))]
    num_chunks, longest = len(forwards), max(chunk_counts)
    # The first round of each kind of action. Round 0 is that of the stage's first forward.
    lag = num_stages - 1 - stage
    starts = {ActionKind.FORWARD: 0, ActionKind.HEAD: lag, ActionKind.HEAD_GRADIENT: lag}
    if is_tied:
        starts[ActionKind.EMBEDDING] = -1 - stage
        if has_backward:
            starts[ActionKind.EMBEDDING_GRADIENT] = 2 * lag + stage + longest
    if has_backward:
        starts[ActionKind.BACKWARD] = 2 * lag + longest - 1
    rounds = []
    for number in range(min(starts.values()), max(starts.values()) + num_chunks):
        actions = []
        for kind, start in starts.items():
            is_gradient = kind in (ActionKind.BACKWARD, ActionKind.EMBEDDING_GRADIENT)
            if start <= number < start + num_chunks:
                actions.append(Action(kind, *(backwards if is_gradient else forwards)[number - start]))
        rounds.append(tuple(actions))
    return rounds


def receives_before(rounds: Sequence[Round]) -> dict[Action, set[ActionKind]]:
    """Return, by action, the messages of neighbors to post a receive for before it, though a later one needs them.

    A neighbor has sent the gradient of a round's backward in the round before, and may wait until it is received. It
    sends the activations of the next round's forward before this round's exchange with all stages.
    """
    kinds: dict[Action, set[ActionKind]] = {}
    for this, following in zip(rounds, [*rounds[1:], ()], strict=True):
        if any(action.kind is ActionKind.BACKWARD for action in this):
            kinds.setdefault(this[0], set()).add(ActionKind.BACKWARD)
        exchange = next((action for action in this if action.kind in _OF_ALL_STAGES), None)
        if exchange is not None and any(action.kind is ActionKind.FORWARD for action in following):
            kinds.setdefault(exchange, set()).add(ActionKind.FORWARD)
    return kinds


def head_schedule(stage: int, num_stages: int, chunk_counts: Sequence[int], *, is_tied: bool = False) -> list[Action]:
    """Return the actions of one stage for one training step, in order."""
    return [action for round_ in head_rounds(stage, num_stages, chunk_counts, is_tied=is_tied) for action in round_]


def max_live_chunks_with_head(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int) -> int:
    """Return how many chunks can await backward: `num_chunks` plus two per later stage, at most all."""
    return min(num_chunks + 2 * (num_stages - 1 - stage), num_micro_batches * num_chunks)
