"""Fused runs: adjacent LSTM or GRU blocks that run in one call, like the layers of one `nn.LSTM` or `nn.GRU`.

In one call, cuDNN computes several layers at once: layer 1 at time step 0 while layer 0 is at time step 1, and so on.

    layer 0    t0  t1  t2  t3                 separate calls: 3 x 4 time steps, one after the other
    layer 1        t0  t1  t2  t3             one call: 4 + 3 - 1
    layer 2            t0  t1  t2  t3

Outputs, parameters and states are those of the separate blocks.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from stretto.base.state import State
from stretto.blocks.block import Block
from stretto.blocks.recurrent import GRU, LSTM, autocast_dtype


def find_fused(blocks: Sequence[Block]) -> tuple[int, ...]:
    """Return the indices of the blocks that can run in one call with the block before them."""
    return tuple(index for index, (before, block) in enumerate(pairwise(blocks), 1) if _can_fuse(before, block))


def fused_runs(num_blocks: int, fused: Sequence[int]) -> list[slice]:
    """Return the runs of blocks that are called together, in order; a block that is not fused is a run of one."""
    edges = [*(index for index in range(num_blocks) if index not in fused), num_blocks]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def run_fused(blocks: Sequence[Block], x: Tensor, states: Sequence[State]) -> tuple[Tensor, list[State]]:
    """Run the blocks of a fused run in one call; return the output, and the state of each block."""
    cells = [_cell(block) for block in blocks]
    layer_counts = [cell.num_layers for cell in cells]
    weights = _weights(cells)
    # Each tensor of the states for all layers together, [layers, batch, features]; `cat` makes it contiguous.
    hx = [torch.cat([tensor.transpose(0, 1) for tensor in tensors]) for tensors in zip(*states, strict=True)]
    dtype = autocast_dtype(x.device.type)
    if dtype is not None:
        x, hx, weights = x.to(dtype), [h.to(dtype) for h in hx], [weight.to(dtype) for weight in weights]
    # Biases, layers, dropout, training, bidirectional, batch_first: as `nn.LSTM` and `nn.GRU` call these functions.
    settings = (cells[0].bias, sum(layer_counts), 0.0, cells[0].training, False, False)
    with nullcontext() if dtype is None else torch.autocast(x.device.type, enabled=False):
        if isinstance(cells[0], nn.LSTM):
            y, *after = torch.lstm(x, hx, weights, *settings)
        else:
            y, *after = torch.gru(x, hx[0], weights, *settings)
    parts = [
        torch.split(tensor.transpose(0, 1).to(before.dtype), layer_counts, dim=1)
        for tensor, before in zip(after, states[0], strict=True)
    ]
    return y, list(zip(*parts, strict=True))


def flatten_weights(blocks: Sequence[Block]) -> None:
    """Move the weights of a fused run into one buffer on a GPU; otherwise cuDNN would copy them in every call.

    The parameters stay the same objects, with the same values and names.
    """
    cells = [_cell(block) for block in blocks]
    first = cells[0]
    sizes = (first.input_size, first.hidden_size, sum(cell.num_layers for cell in cells))
    whole: nn.RNNBase
    if isinstance(first, nn.LSTM):
        whole = nn.LSTM(*sizes, bias=first.bias, proj_size=first.proj_size, device="meta")
    else:
        whole = nn.GRU(*sizes, bias=first.bias, device="meta")
    names = [name for name, _ in whole.named_parameters()]
    for name, weight in zip(names, _weights(cells), strict=True):
        setattr(whole, name, weight)
    whole.flatten_parameters()


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


def _weights(cells: Sequence[nn.RNNBase]) -> list[Tensor]:
    """Return the weights of all layers, in the order in which torch's functions take them."""
    return [weight for cell in cells for layer in cell.all_weights for weight in layer]
