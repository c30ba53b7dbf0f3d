"""Orders: in which order a stage takes its actions.

One micro-batch of four chunks over three stages, fill and drain:

    stage 0  F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0
    stage 1     F0 F1 F2 F3 .  .  B3 B2 B1 B0
    stage 2        F0 F1 F2 F3 B3 B2 B1 B0

Several micro-batches: first in, first out over micro-batches; last in, first out over the chunks of one micro-batch. A stage runs ahead
by as many forwards as it takes until its first gradient can be back, then takes one backward for each further
forward, so it never holds more than `max_live_chunks` chunks.
"""

from collections.abc import Iterator

from stretto.plan.actions import Action, ActionKind


def stage_schedule(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int) -> list[Action]:
    """Return the actions of one stage for one step, in the order in which they are taken."""
    forwards = iter(_forwards(num_micro_batches, num_chunks))
    backwards = iter(_backwards(num_micro_batches, num_chunks))
    warm_up = min(max_live_chunks(stage, num_stages, num_micro_batches, num_chunks), num_micro_batches * num_chunks)
    actions = [next(forwards) for _ in range(warm_up)]
    for forward in forwards:
        actions += [next(backwards), forward]
    return [*actions, *backwards]


def forward_schedule(num_micro_batches: int, num_chunks: int) -> list[Action]:
    """Return the actions of any stage for a step without gradients."""
    return list(_forwards(num_micro_batches, num_chunks))


def max_live_chunks(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int) -> int:
    """Return how many chunks a stage holds at most: a whole micro-batch, and what the stages after it are ahead by."""
    return min(num_chunks + num_stages - 1 - stage, num_micro_batches * num_chunks)


def _forwards(num_micro_batches: int, num_chunks: int) -> Iterator[Action]:
    return (
        Action(ActionKind.FORWARD, micro_batch, chunk)
        for micro_batch in range(num_micro_batches)
        for chunk in range(num_chunks)
    )


def _backwards(num_micro_batches: int, num_chunks: int) -> Iterator[Action]:
    chunks = range(num_chunks - 1, -1, -1)
    return (
        Action(ActionKind.BACKWARD, micro_batch, chunk) for micro_batch in range(num_micro_batches) for chunk in chunks
    )
