"""The wavefront: the layers of a region over the ranks of a group, chunk by chunk of time.

                 slot   0  1  2  3  4  5             A slot per column. In slot s the rank with stage r runs its
    stage 0             0  1  2  3                   layers over chunk s - r, with the rows of all ranks, and sends
    stage 1                0  1  2  3                the result to the next rank, which receives it in the same slot
    stage 2                   0  1  2  3             and runs its own layers over it in slot s + 1.

State never leaves its stage: a stage runs its chunks in order, and each begins with the state that the one before has
returned. So this is exact, with nothing detached. Efficiency: chunks / (chunks + stages - 1).

There is no backward here. Autograd transposes the loop: the token makes the messages run in reverse order, so the
backward is the same picture from right to left, from the last stage to the first.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stretto.parallel.messages import Messages, Shape
from stretto.parallel.rows import Chunk

State = tuple[Tensor, ...]
Stage = Callable[[Tensor, Chunk, State], tuple[Tensor, State]]
"""The layers of one rank: `(steps of a chunk [steps, ...], chunk, state) -> (steps [steps, ...], state)`."""


def run_wavefront(
    stage: Stage,
    steps: Tensor | None,  # of all rows [sum of lengths, ...], on the first stage; None on others
    state: State,  # of this stage's layers and all rows, longest first: tensors [rows, ...]
    chunks: Sequence[Chunk],
    messages: Messages,
    token: Tensor,
    shape: Shape,  # of a step that this stage receives
) -> tuple[Tensor, Tensor | None, State]:
    """Return the token, the last stage's output of all steps (None on others), and the final state of this stage."""
    rank, last = messages.rank, messages.size - 1
    inputs = None if steps is None else torch.split(steps, [chunk.num_steps for chunk in chunks])
    outputs: list[Tensor] = []
    received: list[Tensor] = []
    for slot in range(len(chunks) + last):
        own, following = slot - rank, slot + 1 - rank  # the chunks of this slot and of the next one
        sends, takes = [], []
        if 0 <= own < len(chunks):
            chunk = chunks[own]
            output, state = run_chunk(stage, received[0] if inputs is None else inputs[own], chunk, state)
            if rank < last:
                sends.append((rank + 1, output))
            else:
                outputs.append(output)
        if rank > 0 and 0 <= following < len(chunks):
            takes.append((rank - 1, (chunks[following].num_steps, *shape)))
        token, received = messages.shift(token, sends, takes)
    return token, torch.cat(outputs) if outputs else None, state


def run_chunk(stage: Stage, steps: Tensor, chunk: Chunk, state: State) -> tuple[Tensor, State]:
    """Run the stage on the rows that are alive; rows that have ended keep their state."""
    num_rows = chunk.num_rows
    if all(num_rows == len(tensor) for tensor in state):
        return stage(steps, chunk, state)
    output, alive = stage(steps, chunk, tuple(tensor[:num_rows] for tensor in state))
    return output, tuple(torch.cat([new, old[num_rows:]]) for new, old in zip(alive, state, strict=True))
