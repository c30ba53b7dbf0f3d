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
from stretto.blocks.cast_weights import has_hooks, is_plain, rnn_modules
from stretto.blocks.recurrent import GRU, LSTM, run_rnn
from stretto.blocks.stack import Stack


def find_fused(blocks: Sequence[Block]) -> tuple[int, ...]:
    """Return the indices of the blocks that can run in one call with the block before them."""
    return tuple(index for index, (before, block) in enumerate(pairwise(blocks), 1) if _can_fuse(before, block))


def fused_runs(num_blocks: int, fused: Sequence[int]) -> list[slice]:
    """Return the runs of blocks that are called together, in order; a block that is not fused is a run of one."""
    edges = [*(index for index in range(num_blocks) if index not in fused), num_blocks]
    return [slice(start, stop) for start, stop in pairwise(edges)]


class FusedStack:
    """Runs a stack, with adjacent LSTM (or GRU) blocks of the same size in one call, which is faster on a GPU.

    Outputs, states, gradients and names of parameters are those of the stack itself, which stays as it is.
    """

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self._runs: list[tuple[slice, _FusedRun | None]] = []  # all blocks in order; empty if none are fused
        # A subclass may do something else, and hooks of a stack are called by the stack only.
        if type(stack).forward is Stack.forward and not has_hooks(stack):
            blocks = list(stack)
            fused = find_fused(blocks)
            runs = fused_runs(len(blocks), fused) if fused else []
            self._runs = [(run, _FusedRun(blocks[run]) if run.stop - run.start > 1 else None) for run in runs]

    @property
    def _fused_runs(self) -> list["_FusedRun"]:
        return [fused for _, fused in self._runs if fused is not None]

    @property
    def rnns(self) -> list[nn.RNNBase]:
        """Torch's RNN modules that are called; blocks in one call share one."""
        fused_cells = {cell for fused in self._fused_runs for cell in fused.cells}
        cells = [cell for cell in rnn_modules(self.stack) if cell not in fused_cells]
        return [*cells, *(fused.rnn for fused in self._fused_runs)]

    def __call__(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the output and the state after it, as the stack does."""
        if not all(fused.is_current for fused in self._fused_runs):
            self._runs = []  # a weight was replaced, so the blocks run one by one from now on
        if not self._runs:
            return self.stack(x, state)
        blocks, states = list(self.stack), self.stack.split_state(state)
        new_state: list[Tensor] = []
        for run, fused in self._runs:
            if fused is None:
                x, after = blocks[run.start](x, states[run.start])
                new_state.extend(after)
            else:
                x, states_after = fused(x, states[run])
                new_state.extend(tensor for after in states_after for tensor in after)
        return x, tuple(new_state)


class _FusedRun:
    """Blocks that run in one call: torch's module with the layers of all of them, which shares their weights.

    On a GPU the weights are in one buffer; otherwise cuDNN would copy them in every call. The parameters stay the same
    objects, with the same values and names.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.cells = [_cell(block) for block in blocks]
        self._layer_counts = [cell.num_layers for cell in self.cells]
        first, num_layers = self.cells[0], sum(self._layer_counts)
        if isinstance(first, nn.LSTM):
            self.rnn: nn.RNNBase = nn.LSTM(
                first.input_size, first.hidden_size, num_layers, first.bias, proj_size=first.proj_size, device="meta"
            )
        else:
            self.rnn = nn.GRU(first.input_size, first.hidden_size, num_layers, first.bias, device="meta")
        names = [name for name, _ in self.rnn.named_parameters()]
        for name, weight in zip(names, self._weights(), strict=True):
            setattr(self.rnn, name, weight)
        self.rnn.flatten_parameters()

    @property
    def is_current(self) -> bool:
        """Whether the blocks still have the weights that this run shares with them."""
        return all(own is weight for own, weight in zip(self.rnn._flat_weights, self._weights(), strict=True))

    def __call__(self, x: Tensor, states: Sequence[State]) -> tuple[Tensor, list[State]]:
        """Return the output, and the state of each block."""
        # Each tensor of the states for all layers together, [layers, batch, features]; `cat` makes it contiguous.
        hx = tuple(torch.cat([tensor.transpose(0, 1) for tensor in tensors]) for tensors in zip(*states, strict=True))
        self.rnn.training = self.cells[0].training
        y, after = run_rnn(self.rnn, x, hx if len(hx) > 1 else hx[0])
        parts = [
            torch.split(tensor.transpose(0, 1).to(before.dtype), self._layer_counts, dim=1)
            for tensor, before in zip(after if len(hx) > 1 else [after], states[0], strict=True)
        ]
        return y, list(zip(*parts, strict=True))

    def _weights(self) -> list[Tensor]:
        return [weight for cell in self.cells for weight in cell._flat_weights if weight is not None]


def _can_fuse(before: Block, block: Block) -> bool:
    # Exact types only: a subclass may compute something else.
    if type(block) not in (LSTM, GRU) or type(before) is not type(block) or has_hooks(before) or has_hooks(block):
        return False
    cell, cell_before = _cell(block), _cell(before)
    if not is_plain(cell) or not is_plain(cell_before):
        return False
    same = all(getattr(cell, name) == getattr(cell_before, name) for name in ("hidden_size", "proj_size", "bias"))
    return same and cell.input_size == (cell_before.proj_size or cell_before.hidden_size)


def _cell(block: Block) -> nn.RNNBase:
    return cast(LSTM | GRU, block).cell
