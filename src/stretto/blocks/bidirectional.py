"""Bidirectional LSTM and GRU blocks: they read each row in both directions, so they need all chunks at once."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from stretto.base.device_copy import to_device
from stretto.base.state import State
from stretto.base.window import Rows
from stretto.blocks.block import Block
from stretto.blocks.recurrent import run_rnn


class Bidirectional(Block):
    """The base of both: torch's cell reads each row in both directions; outputs have `2 * hidden_size` features.

    It does not satisfy the chunk law, since the first output depends on the last input. Its state holds each row's
    length, so that the backward direction starts at the row's last valid time step and not in the padding.
    """

    causal = False

    def __init__(self, cell: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        self.cell = cell

    def initial_state(self, rows: Rows) -> State:
        return (rows.lengths,)  # on the CPU, as packing requires

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        (lengths,) = state
        if bool((lengths >= x.shape[0]).all()):
            y, _ = run_rnn(self.cell, x)
            return y, state
        # Packing needs at least one time step per row; a row of length 0 has no targets, so its outputs don't matter.
        sorted_lengths, order = lengths.clamp(1, x.shape[0]).sort(descending=True, stable=True)
        # The rows are sorted here because torch would copy the order to the device in a way that makes the host wait.
        indices, inverse = to_device(torch.stack([order, order.argsort()]), x.device)
        packed = pack_padded_sequence(x.index_select(1, indices), sorted_lengths)
        packed_y, _ = run_rnn(self.cell, packed)
        y, _ = pad_packed_sequence(packed_y, total_length=x.shape[0])
        return y.index_select(1, inverse), state


class BidirectionalLSTM(Bidirectional):
    """An LSTM that reads each row in both directions; outputs have `2 * hidden_size` features, forward ones first.

    For one label or value per row, put `FinalStates`, `MeanPool` or `MaxPool` after it: at a row's last time step, the
    backward direction has read only that step. All chunks of a window run at once; the state holds each row's length.
    """

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, *, bias: bool = True) -> None:
        super().__init__(nn.LSTM(input_size, hidden_size, num_layers, bias=bias, bidirectional=True))


class BidirectionalGRU(Bidirectional):
    """A GRU that reads each row in both directions, used like `BidirectionalLSTM`."""

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, *, bias: bool = True) -> None:
        super().__init__(nn.GRU(input_size, hidden_size, num_layers, bias=bias, bidirectional=True))
