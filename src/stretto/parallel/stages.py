"""The layers of a causal nn.LSTM, nn.GRU or nn.RNN over the stages of a group: from rows to layers, and back.

    my rows, all layers        all rows, my layers          my rows, all layers
      rank 0  x0  --+  swap   stage 0  wavefront     swap  +-- y0
      rank 1  x1  --+------->  stage 1  ........... ------>+-- y1
      rank 2  x2  --+         stage 2                      +-- y2

The first stage gets the steps of all rows, and each stage the state of its layers; the last stage has the outputs.
"""

import torch
from torch import Tensor, nn

from stretto.parallel.inputs import Inputs, SharedCall
from stretto.parallel.messages import Shape
from stretto.parallel.stage import LayerDropout, RnnStage, enter, layer_costs, state_widths
from stretto.parallel.wavefront import run_wavefront


def run_stages(rnn: nn.RNNBase, inputs: Inputs, call: SharedCall) -> tuple[Tensor, list[Tensor]]:
    """Return the values of this rank's rows, and their state after all layers, layer by layer."""
    messages, packing = call.messages, call.packing
    rank, last = messages.rank, messages.size - 1
    stages, widths = (
        call.layout.split(layer_costs(rnn)),
        state_widths(rnn),
    )  # layers of each rank; widths of their state
    input_width, output_width = rnn.input_size, rnn.proj_size or rnn.hidden_size

    # From rows to stages. Without a state on any rank, each stage begins with zeros of its own.
    # (The values are made before the weights enter: fully_shard's backward hooks run in the opposite order.)
    values = inputs.values(is_even=packing.is_even)
    own_state = inputs.all_state() if call.has_state else []
    state_of = [slice(stage.start * len(widths), stage.stop * len(widths)) for stage in stages]
    give = [[values] * (to == 0) + own_state[state_of[to]] for to in range(last + 1)]
    take: list[list[Shape]] = [
        [packing.values_shape(source, input_width)] * (rank == 0)
        + [packing.state_shape(source, width) for width in widths * len(stages[rank])] * call.has_state
        for source in range(last + 1)
    ]
    token, weights = enter(rnn, messages.token(values, needs_grad=call.needs_grad), stages[rank], inputs.dtype)
    token, received = messages.swap(token, give, take)
    steps = packing.pack([parts.pop(0) for parts in received]) if rank == 0 else None
    if call.has_state:
        state = tuple(packing.sort_rows(parts) for parts in zip(*received, strict=True))
    else:
        state = tuple(inputs.zeros(len(packing.lengths), widths * len(stages[rank])))

    dropout = LayerDropout.of_rows(rnn.dropout, call.seeds, packing) if rnn.dropout else None
    stage = RnnStage(rnn, stages[rank], weights, dropout, recompute=call.layout.recompute)
    with torch.autocast(inputs.device.type, enabled=False):
        chunks = packing.chunks(call.layout.chunks)
        token, y, state = run_wavefront(stage, steps, state, chunks, messages, token, output_width)

    # From stages to rows.
    states = [packing.unsort_rows(tensor) for tensor in state]
    outputs = [[]] * (last + 1) if y is None else [[part] for part in packing.unpack(y)]
    give = [[*outputs[to], *(parts[to] for parts in states)] for to in range(last + 1)]
    take = [
        [packing.values_shape(rank, output_width)] * (source == last)
        + [packing.state_shape(rank, width) for width in widths * len(stages[source])]
        for source in range(last + 1)
    ]
    _, received = messages.swap(token, give, take, call.before_backward)
    return received[last].pop(0), [tensor for parts in received for tensor in parts]
