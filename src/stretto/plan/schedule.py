"""Schedules: the order in which a stage runs its actions.

One micro-batch of four chunks over three stages:

    stage 0  F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0
    stage 1     F0 F1 F2 F3 .  .  B3 B2 B1 B0
    stage 2        F0 F1 F2 F3 B3 B2 B1 B0

With several micro-batches, backwards are FIFO over micro-batches and LIFO over the chunks of each, as in Seq1F1B. A
stage starts with `max_live_chunks` forwards, then runs one backward before each further forward (1F1B).
"""

from stretto.plan.actions import Action, ActionKind


def stage_schedule(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int) -> list[Action]:
    """Return the actions of one stage for one training step, in order."""
    forwards = forward_schedule(num_micro_batches, num_chunks)
    backwards = (
        Action(ActionKind.BACKWARD, micro_batch, chunk)
        for micro_batch in range(num_micro_batches)
        for chunk in reversed(range(num_chunks))
    )
    num_warm_up = max_live_chunks(stage, num_stages, num_micro_batches, num_chunks)
    actions = forwards[:num_warm_up]
    for forward in forwards[num_warm_up:]:
        actions += [next(backwards), forward]
    return [*actions, *backwards]


def forward_schedule(num_micro_batches: int, num_chunks: int) -> list[Action]:
    """Return a step's forwards in order, the same on every stage; an evaluation step has no other actions."""
    return [
        Action(ActionKind.FORWARD, micro_batch, chunk)
        for micro_batch in range(num_micro_batches)
        for chunk in range(num_chunks)
    ]


def max_live_chunks(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int) -> int:
    """Return how many chunks can await backward on a stage: `num_chunks` plus one per later stage, at most all."""
    return min(num_chunks + num_stages - 1 - stage, num_micro_batches * num_chunks)
