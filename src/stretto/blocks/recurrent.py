"""LSTM and GRU blocks: torch's fused modules (cuDNN, oneDNN), but with a state that has the batch in dim 0."""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from stretto.base.resets import Resets
from stretto.base.state import State
from stretto.base.window import Rows
from stretto.blocks.block import Block
from stretto.blocks.cast_weights import find_cast, has_hooks, is_plain
from stretto.blocks.recurrent_resets import Episodes, can_scan, scan

RnnSequence = TypeVar("RnnSequence", Tensor, PackedSequence)
"""The input or output of torch's RNN modules."""


def layers_first(tensor: Tensor) -> Tensor:
    """Return `[batch, layers, features]` as torch's `[layers, batch, features]`, contiguous as cuDNN requires."""
    return tensor.transpose(0, 1).contiguous()


def batch_first(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `[layers, batch, features]` as `[batch, layers, features]`, converted from autocast's dtype to `dtype`."""
    return tensor.transpose(0, 1).to(dtype)


def run_rnn(
    rnn: nn.RNNBase, x: RnnSequence, state: Tensor | tuple[Tensor, ...] | None = None
) -> tuple[RnnSequence, Any]:
    """Call torch's module; under autocast, in autocast's dtype."""
    device_type = x.data.device.type
    if device_type == "meta" and not torch.is_grad_enabled() and isinstance(x, Tensor):
        # torch would run its cell operation by operation, in Python: 20 ms.
        num_outputs = (rnn.proj_size or rnn.hidden_size) * (2 if rnn.bidirectional else 1)
        return x.new_empty(*x.shape[:-1], num_outputs), state
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return rnn(x, state)  # type: ignore[no-any-return]
    # torch's autocast runs cuDNN's RNNs in fp16 even if bf16 is requested, and none in fp16 on a CPU, so we cast here.
    dtype = torch.get_autocast_dtype(device_type)
    with torch.autocast(device_type, enabled=False):
        return run_in_dtype(rnn, x, state, dtype)


def run_in_dtype(
    rnn: nn.RNNBase, x: RnnSequence, state: Tensor | tuple[Tensor, ...] | None, dtype: torch.dtype
) -> tuple[RnnSequence, Any]:
    """Call torch's module with its weights, the input and the state in `dtype`."""
    if isinstance(state, tuple):
        state = tuple(tensor.to(dtype) for tensor in state)
    elif state is not None:
        state = state.to(dtype)
    if is_plain(rnn):
        return find_cast(rnn, dtype)(x.to(dtype), state)  # type: ignore[no-any-return]
    weights = {name: weight.to(dtype) for name, weight in rnn.named_parameters()}
    return torch.func.functional_call(rnn, weights, (x.to(dtype), state))  # type: ignore[no-any-return]


class _Recurrent(Block):
    """The base of LSTM and GRU: how they run a chunk with resets."""

    cell: nn.LSTM | nn.GRU

    def run_with_resets(self, x: Tensor, state: State, resets: Resets) -> tuple[Tensor, State]:
        # A subclass may have another initial state, and only a call of the block calls its hooks.
        if type(self) not in (LSTM, GRU) or has_hooks(self) or not bool(resets.ends.any()):
            return super().run_with_resets(x, state, resets)
        if can_scan(self.cell, x):
            y, after = scan(self.cell, x, state, resets)
        else:
            episodes = Episodes.of(resets.ends, x.device)
            spread = tuple(episodes.spread_state(tensor) for tensor in state)
            packed, spread_after = self._call_cell(episodes.pack(x), spread)
            y = episodes.unpack(packed, x.shape[1])
            after = tuple(episodes.last_state(tensor) for tensor in spread_after)
        return y, self.begin(resets.rows_after(len(x)), after)

    def _call_cell(self, x: RnnSequence, state: State) -> tuple[RnnSequence, State]:
        """Call torch's module, with states that have the batch in dim 0."""
        before = tuple(layers_first(tensor) for tensor in state)
        y, after = run_rnn(self.cell, x, before if len(before) > 1 else before[0])
        after = after if len(before) > 1 else (after,)
        return y, tuple(batch_first(new, old.dtype) for new, old in zip(after, state, strict=True))


class LSTM(_Recurrent):
    """An `nn.LSTM` as a block: its `num_layers` layers run in one fused call.

    State: `(h, c)`, each `[batch, layers, features]`. With `proj_size`, outputs and `h` have that many features. A
    pipeline stage holds whole blocks, so the layers of a block are never split between stages. The engines of
    `make_engine` also run adjacent LSTM blocks of a stage in one call.
    """

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, *, proj_size: int = 0, bias: bool = True
    ) -> None:
        super().__init__()
        self.cell = nn.LSTM(input_size, hidden_size, num_layers, bias=bias, proj_size=proj_size)  # all layers

    def initial_state(self, rows: Rows) -> State:
        h = rows.zeros(self.cell.num_layers, self.cell.proj_size or self.cell.hidden_size)
        return h, rows.zeros(self.cell.num_layers, self.cell.hidden_size)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return self._call_cell(x, state)


class GRU(_Recurrent):
    """An `nn.GRU` as a block: its layers run in one fused call. State: `(h,)`, `[batch, layers, features]`."""

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, *, bias: bool = True) -> None:
        super().__init__()
        self.cell = nn.GRU(input_size, hidden_size, num_layers, bias=bias)

    def initial_state(self, rows: Rows) -> State:
        return (rows.zeros(self.cell.num_layers, self.cell.hidden_size),)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return self._call_cell(x, state)
