"""Fused runs: adjacent LSTM or GRU blocks that run in one call, like the layers of one `nn.LSTM` or `nn.GRU`.

In one call, cuDNN computes several layers at once: layer 1 at time step 0 while layer 0 is at time step 1, and so on.

    layer 0    t0  t1  t2  t3                 separate calls: 3 x 4 time steps, one after the other
    layer 1        t0  t1  t2  t3             one call: 4 + 3 - 1
    layer 2            t0  t1  t2  t3

Outputs, parameters and states are those of the separate blocks.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from stretto.base.state import State
from stretto.blocks.block import Block
from stretto.blocks.recurrent import GRU, LSTM, run_rnn


def find_fused(blocks: Sequence[Block]) -> tuple[int, ...]:
    """Return the indices of the blocks that can run in one call with the block before them."""
    return tuple(index for index, (before, block) in enumerate(pairwise(blocks), 1) if _can_fuse(before, block))


def fused_runs(num_blocks: int, fused: Sequence[int]) -> list[slice]:
    """Return the runs of blocks that are called together, in order; a block that is not fused is a run of one."""
    edges = [*(index for index in range(num_blocks) if index not in fused), num_blocks]
    return [slice(start, stop) for start, stop in pairwise(edges)]


class FusedRun:
    """Blocks that run in one call: torch's module with the layers of all of them, which shares their weights.

    On a GPU the weights are in one buffer; otherwise cuDNN would copy them in every call. The parameters stay the same
    objects, with the same values and names.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.cells = [_cell(block) for block in blocks]
        first, num_layers = self.cells[0], sum(cell.num_layers for cell in self.cells)
        if isinstance(first, nn.LSTM):
            self.rnn: nn.RNNBase = nn.LSTM(
                first.input_size, first.hidden_size, num_layers, first.bias, proj_size=first.proj_size, device="meta"
            )
        else:
            self.rnn = nn.GRU(first.input_size, first.hidden_size, num_layers, first.bias, device="meta")
        names = [name for name, _ in self.rnn.named_parameters()]
        weights = [weight for cell in self.cells for layer in cell.all_weights for weight in layer]
        for name, weight in zip(names, weights, strict=True):
            setattr(self.rnn, name, weight)
        self.rnn.flatten_parameters()

    def __call__(self, x: Tensor, states: Sequence[State]) -> tuple[Tensor, list[State]]:
        """Return the output, and the state of each block."""
        # Each tensor of the states for all layers together, [layers, batch, features]; `cat` makes it contiguous.
        hx = tuple(torch.cat([tensor.transpose(0, 1) for tensor in tensors]) for tensors in zip(*states, strict=True))
        self.rnn.training = self.cells[0].training
        y, after = run_rnn(self.rnn, x, hx if len(hx) > 1 else hx[0])
        layer_counts = [cell.num_layers for cell in self.cells]
        parts = [
            torch.split(tensor.transpose(0, 1).to(before.dtype), layer_counts, dim=1)
            for tensor, before in zip(after if len(hx) > 1 else [after], states[0], strict=True)
        ]
        return y, list(zip(*parts, strict=True))


def _can_fuse(before: Block, block: Block) -> bool:
    # Exact types only: a subclass may compute something else, and torch's parametrizations subclass a cell.
    if type(block) not in (LSTM, GRU) or type(before) is not type(block):
        return False
    cell, cell_before = _cell(block), _cell(before)
    if type(cell) not in (nn.LSTM, nn.GRU) or type(cell_before) is not type(cell):
        return False
    same = all(getattr(cell, name) == getattr(cell_before, name) for name in ("hidden_size", "proj_size", "bias"))
    return same and cell.input_size == (cell_before.proj_size or cell_before.hidden_size)


def _cell(block: Block) -> nn.RNNBase:
    return cast(LSTM | GRU, block).cell
