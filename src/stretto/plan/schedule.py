"""Schedules: the order in which a stage runs its actions.

One micro-batch of four chunks over three stages:

    stage 0  F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0
    stage 1     F0 F1 F2 F3 .  .  B3 B2 B1 B0
    stage 2        F0 F1 F2 F3 B3 B2 B1 B0

With several micro-batches, backwards are FIFO over micro-batches and LIFO over the chunks of each, as in Seq1F1B. A
stage starts with `max_live_chunks` forwards, then runs one backward before each further forward (1F1B).

With several runs of blocks per stage (`interleave`), chunks pass the stages in groups: all chunks of a group pass run
0, then all pass run 1 (b), and so on; backwards in reverse. Four chunks over two stages, two groups of two:

    stage 0  F0 F1 F0b F1b F2 F3 F2b F3b .   .   B3b B2b B3 B2 B1b B0b B1 B0
    stage 1     F0 F1 F0b F1b F2 F3 F2b F3b B3b B2b B3 B2 B1b B0b B1 B0

A group has as many chunks as there are stages. Then a chunk comes back from the last stage just when the first one is
ready for it: fewer chunks would leave stages without work, and of more the last stage would have to keep finished
messages that the first one does not take yet. On a GPU, such a message can occupy the device.

A run that looks ahead (`RunChain.whole`) takes a micro-batch at once. Here the only one of stage 1 of three:

    stage 0  F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .  B3 B2 B1 B0
    stage 1  .  .  .  .  F0--------- .  .  .  .  .  .  .  .  B0--------- .
    stage 2  .  .  .  .  .  .  .  .  F0 F1 F2 F3 B3 B2 B1 B0

With several micro-batches, all forwards then come before all backwards (GPipe): stages on both sides of such a run send
a micro-batch's chunks all at once, and would wait for each other if one of them sent gradients meanwhile.
"""

from collections.abc import Iterator
from itertools import pairwise

from stretto.plan.actions import Action, ActionKind
from stretto.plan.run_chain import RunChain


def stage_schedule(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int) -> list[Action]:
    """Return the actions of one stage for one training step, in order, with one run of causal blocks per stage."""
    return chain_schedule(RunChain.of(num_stages), stage, num_micro_batches, num_chunks)


def chain_schedule(chain: RunChain, stage: int, num_micro_batches: int, num_chunks: int) -> list[Action]:
    """Return the actions of one stage for one training step, in order, for any runs of blocks."""
    sizes = _padded_sizes(chain, num_micro_batches, num_chunks)
    forwards = list(_in_order(ActionKind.FORWARD, chain, stage, *sizes))
    backwards = _in_order(ActionKind.BACKWARD, chain, stage, *sizes)
    num_warm_up = _num_warm_up(forwards, chain, stage, sizes[1])
    actions = forwards[:num_warm_up]
    for forward in forwards[num_warm_up:]:
        actions += [next(backwards), forward]
    actions += backwards
    if sizes == (num_micro_batches, num_chunks):
        return actions
    return [action for action in actions if action.micro_batch < num_micro_batches and action.chunk < num_chunks]


def forward_schedule(chain: RunChain, stage: int, num_micro_batches: int, num_chunks: int) -> list[Action]:
    """Return a stage's forwards in order; an evaluation step has no other actions."""
    actions = chain_schedule(chain, stage, num_micro_batches, num_chunks)
    return [action for action in actions if action.kind is ActionKind.FORWARD]


def following_actions(chain: RunChain, stage: int, num_micro_batches: int, num_chunks: int) -> dict[Action, Action]:
    """Return, by action, the next one of the same kind, if nothing was left out between them (see `_padded_sizes`)."""
    sizes = _padded_sizes(chain, num_micro_batches, num_chunks)
    kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
    return {
        action: following for kind in kinds for action, following in pairwise(_in_order(kind, chain, stage, *sizes))
    }


def max_live_chunks(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int) -> int:
    """Return how many chunks can await backward on a stage: `num_chunks` plus one per later stage, at most all.

    This is for one run of causal blocks per stage.
    """
    return min(num_chunks + num_stages - 1 - stage, num_micro_batches * num_chunks)


def _in_order(
    kind: ActionKind, chain: RunChain, stage: int, num_micro_batches: int, num_chunks: int
) -> Iterator[Action]:
    """Yield the forwards or the backwards of a stage: group by group, in each run by run, in each chunk by chunk.

    All stages use the same groups, so each sends messages in the order in which the next one takes them.
    """
    is_forward = kind is ActionKind.FORWARD
    runs = list(enumerate(chain.runs_of_stage[stage]))
    for group in _groups(chain, num_micro_batches, num_chunks):
        for run, number in runs if is_forward else reversed(runs):
            if chain.whole[number]:
                yield Action(kind, group.start // num_chunks, 0, run)
                continue
            for index in group:
                micro_batch, chunk = divmod(index, num_chunks)
                yield Action(kind, micro_batch, chunk if is_forward else num_chunks - 1 - chunk, run)


def _groups(chain: RunChain, num_micro_batches: int, num_chunks: int) -> list[range]:
    """Return the groups of chunks, which are numbered over all micro-batches."""
    total = num_micro_batches * num_chunks
    if not chain.is_interleaved:
        num_groups = num_micro_batches if any(chain.whole) else 1
    else:
        num_groups = total // chain.num_stages
    edges = [total * index // num_groups for index in range(num_groups + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]


def _padded_sizes(chain: RunChain, num_micro_batches: int, num_chunks: int) -> tuple[int, int]:
    """Return numbers of micro-batches and chunks from which groups of exactly one chunk per stage can be made.

    Only then is the order safe if chunks pass the stages several times while backwards run too: with smaller groups, a
    stage could wait for a chunk to come back that its own next backward is holding up on another stage. So orders are
    made with some chunks more, which are then left out.
    """
    num_stages = chain.num_stages
    if not chain.is_interleaved:
        return num_micro_batches, num_chunks
    if num_chunks >= num_stages:
        return num_micro_batches, -(-num_chunks // num_stages) * num_stages
    while num_stages % num_chunks:
        num_chunks += 1
    per_group = num_stages // num_chunks
    return -(-num_micro_batches // per_group) * per_group, num_chunks


def _num_warm_up(forwards: list[Action], chain: RunChain, stage: int, num_chunks: int) -> int:
    """Return how many forwards a stage runs before its first backward."""
    if any(chain.whole):
        return len(forwards)
    runs = chain.runs_of_stage[stage]
    # The first backward needs the first micro-batch to have passed this stage, and then the later stages.
    first = Action(ActionKind.FORWARD, 0, num_chunks - 1, len(runs) - 1)
    num_later = chain.num_stages - 1 - stage
    # If chunks pass the stages several times, no stage may wait for a message that was sent only just before.
    num_ahead = 2 * num_later if chain.is_interleaved else num_later
    return min(forwards.index(first) + 1 + num_ahead, len(forwards))
