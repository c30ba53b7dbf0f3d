"""Direction: one direction of one layer of a bidirectional block, over some time steps, from a state to a state.

A bidirectional block needs whole rows, but each of its directions satisfies the chunk law: the forward direction from
left to right, the backward direction from right to left. For rows of 5 and 3 time steps, cut after the third:

    time ->      0   1   2 | 3   4
    row 0        x   x   x | x   x       backward: starts at time step 4, passes its state on to the left part
    row 1        x   x   x |             backward: starts at time step 2, from the initial state
"""

from typing import cast

import torch
from torch import Tensor, nn

from stretto.base.device_copy import to_device
from stretto.base.state import State
from stretto.base.window import Rows
from stretto.blocks.bidirectional import Bidirectional
from stretto.blocks.cast_weights import has_hooks


class Direction:
    """One direction of one layer. It reads `[time, batch, features]`; its state is `(h, c)` or `(h,)`, `[batch, H]`."""

    def __init__(self, cell: nn.LSTM | nn.GRU, layer: int, *, is_reverse: bool) -> None:
        self.cell = cell
        self.is_reverse = is_reverse
        suffix = f"l{layer}{'_reverse' if is_reverse else ''}"
        kinds = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if cell.bias else [])]
        self.names = [f"{kind}_{suffix}" for kind in kinds]

    def initial_state(self, rows: Rows) -> State:
        """Return zeros, as torch's modules start with."""
        h = rows.zeros(self.cell.hidden_size)
        return (h, rows.zeros(self.cell.hidden_size)) if isinstance(self.cell, nn.LSTM) else (h,)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The weights of this direction; all of the cell's if they are computed from others."""
        own = [self.cell._parameters.get(name) for name in self.names]
        found = [weight for weight in own if weight is not None]
        return found if len(found) == len(own) else list(self.cell.parameters())

    def __call__(self, x: Tensor, state: State, lengths: Tensor) -> tuple[Tensor, State]:
        """Return the outputs, and the state after each row's last time step, or its first in the backward direction.

        `lengths` (int64, on the CPU) has each row's number of valid time steps, longest first; at least one counts.
        Outputs at or after a row's length are zeros.
        """
        weights = [cast(Tensor, getattr(self.cell, name)) for name in self.names]
        dtypes = [tensor.dtype for tensor in state]
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weights = x.to(dtype), [weight.to(dtype) for weight in weights]
            state = tuple(tensor.to(dtype) for tensor in state)
        with torch.autocast(x.device.type, enabled=False):
            if bool((lengths >= len(x)).all()):
                y, after = self._run_whole(x, state, weights)
            else:
                y, after = self._run_packed(x, state, weights, lengths.clamp(1, len(x)))
        return y, tuple(tensor.squeeze(0).to(dtype) for tensor, dtype in zip(after, dtypes, strict=True))

    def _run_whole(self, x: Tensor, state: State, weights: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Run rows that all have every time step."""
        inputs = x.flip(0) if self.is_reverse else x
        hx = [tensor.unsqueeze(0) for tensor in state]
        options = (self.cell.bias, 1, 0.0, self.cell.training, False, False)
        if isinstance(self.cell, nn.LSTM):
            y, *after = torch.lstm(inputs, hx, weights, *options)
        else:
            y, *after = torch.gru(inputs, hx[0], weights, *options)
        return y.flip(0) if self.is_reverse else y, after

    def _run_packed(
        self, x: Tensor, state: State, weights: list[Tensor], lengths: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Run rows of different lengths, each from its own end in the backward direction."""
        num_steps, num_rows = x.shape[:2]
        times = torch.arange(int(lengths[0])).unsqueeze(1)
        batch_sizes = (times < lengths).sum(1)
        # The time step that each row reads in each step of the packed sequence, and its index in the flattened input.
        read = lengths - 1 - times if self.is_reverse else times.expand(-1, num_rows)
        indices = (read * num_rows + torch.arange(num_rows))[times < lengths]
        indices = to_device(indices, x.device)
        data = x.flatten(0, 1).index_select(0, indices)
        hx = [tensor.unsqueeze(0).contiguous() for tensor in state]
        options = (self.cell.bias, 1, 0.0, self.cell.training, False)
        if isinstance(self.cell, nn.LSTM):
            packed, *after = torch.lstm(data, batch_sizes, hx, weights, *options)
        else:
            packed, *after = torch.gru(data, batch_sizes, hx[0], weights, *options)
        y = packed.new_zeros(num_steps * num_rows, packed.shape[1]).index_copy(0, indices, packed)
        return y.view(num_steps, num_rows, -1), after


def find_directions(block: Bidirectional) -> list[tuple[Direction, Direction]] | None:
    """Return both directions of each layer of a block; None if a call of the block may do something else."""
    if type(block).forward is not Bidirectional.forward or has_hooks(block) or has_hooks(block.cell):
        return None
    cell = block.cell
    if type(cell) not in (nn.LSTM, nn.GRU) or cell.dropout or cell.proj_size or not cell.bidirectional:
        return None
    return [
        (Direction(cell, layer, is_reverse=False), Direction(cell, layer, is_reverse=True))
        for layer in range(cell.num_layers)
    ]
