"""Causal layers over the stages of a group: from rows to layers, and back.

    my rows, all layers        all rows, my layers          my rows, all layers
      rank 0  x0  --+  swap   stage 0  wavefront     swap  +-- y0
      rank 1  x1  --+------->  stage 1  ........... ------>+-- y1
      rank 2  x2  --+         stage 2                      +-- y2

The first stage gets the steps of all rows, and each stage the state of its layers; the last stage has the outputs.
"""

from collections.abc import Sequence
from functools import reduce
from itertools import chain

import torch
from torch import Tensor

from stretto.parallel.layers import Form, Inputs, Layers, SharedCall, enter
from stretto.parallel.messages import Hook, Messages
from stretto.parallel.rows import Chunk
from stretto.parallel.wavefront import State, run_wavefront


def run_stages(layers: Layers, inputs: Inputs, call: SharedCall) -> tuple[Tensor, list[Tensor]]:
    """Return the values of this rank's rows, and their state after all layers, layer by layer."""
    messages, packing = call.messages, call.rows.packing
    rank, last = messages.rank, messages.size - 1
    stages = call.split.stages if call.split else call.layout.split(layers.costs)  # layers of each rank
    between, state_forms = layers.forms(inputs)
    state_of = [[form for layer in stage for form in state_forms[layer]] for stage in stages]
    first, output = between[0], between[-1]

    # From rows to stages. Without a state on any rank, each stage makes its own.
    # (The values are made before the weights enter: fully_shard's backward hooks run in the opposite order.)
    values = inputs.values(is_even=packing.is_even)
    own_state = iter(inputs.all_state() if call.has_state else ())
    entering = [forms if call.has_state else [] for forms in state_of]
    give = [[values] * (to == 0) + [next(own_state) for _ in entering[to]] for to in range(last + 1)]
    take = [
        [Form(packing.values_shape(source, *first.shape), first.dtype)] * (rank == 0)
        + [Form(packing.state_shape(source, *shape), dtype) for shape, dtype in entering[rank]]
        for source in range(last + 1)
    ]
    dtypes = [form.dtype for forms in (*entering, [first]) for form in forms]
    token = torch.zeros((), dtype=_widest(dtypes), device=values.device, requires_grad=call.needs_grad)
    token, weights = enter(layers, token, stages[rank], inputs.dtype, call.split)
    token, received = _swap(messages, token, give, take, dtypes, lambda: None)
    steps = packing.pack([parts.pop(0) for parts in received]) if rank == 0 else None
    stage = layers.stage(stages[rank], weights, call.rows)
    state = stage.begin(received if call.has_state else [])

    coming, chunks = between[stages[rank].start], packing.chunks(call.layout.chunks)
    token = token.to(_widest([between[each.stop].dtype for each in stages]))

    def run(steps: Tensor, chunk: Chunk, state: State) -> tuple[Tensor, State]:
        y, state = stage(steps.to(coming.dtype), chunk, state)
        return y.to(token.dtype), state

    token, y, state = run_wavefront(run, steps, state, chunks, messages, token, coming.shape)

    # From stages to rows.
    states = [packing.unsort_rows(tensor) for tensor in state]
    outputs = [[]] * (last + 1) if y is None else [[part] for part in packing.unpack(y)]
    give = [[*outputs[to], *(parts[to] for parts in states)] for to in range(last + 1)]
    take = [
        [Form(packing.values_shape(rank, *output.shape), output.dtype)] * (source == last)
        + [Form(packing.state_shape(rank, *shape), dtype) for shape, dtype in state_of[source]]
        for source in range(last + 1)
    ]
    dtypes = [form.dtype for forms in (*state_of, [output]) for form in forms]
    _, received = _swap(messages, token.to(_widest(dtypes)), give, take, dtypes, call.before_backward)
    return received[last].pop(0), [tensor for parts in received for tensor in parts]


def _widest(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Return the floating-point dtype that can hold the values of all of these."""
    return reduce(torch.promote_types, [dtype for dtype in dtypes if dtype.is_floating_point] or [torch.float32])


def _swap(
    messages: Messages,
    token: Tensor,
    give: Sequence[Sequence[Tensor]],
    take: Sequence[Sequence[Form]],
    dtypes: Sequence[torch.dtype],  # of all ranks' tensors
    before_backward: Hook,
) -> tuple[Tensor, list[list[Tensor]]]:
    """Swap tensors of these dtypes; integers in a message of their own."""
    integers: list[Tensor] = []
    if not all(dtype.is_floating_point for dtype in dtypes):
        like = torch.empty(0, dtype=torch.int64, device=token.device)
        given = [[tensor for tensor in tensors if not tensor.is_floating_point()] for tensors in give]
        shapes = [[form.shape for form in forms if not form.dtype.is_floating_point] for forms in take]
        integers = messages.all_to_all(
            [*chain(*given)], [[each.shape for each in part] for part in given], shapes, like
        )
    token, received = messages.swap(
        token,
        [[tensor.to(token.dtype) for tensor in tensors if tensor.is_floating_point()] for tensors in give],
        [[form.shape for form in forms if form.dtype.is_floating_point] for forms in take],
        before_backward,
    )
    left = {True: chain(*received), False: iter(integers)}
    return token, [[next(left[dtype.is_floating_point]).to(dtype) for _, dtype in forms] for forms in take]
