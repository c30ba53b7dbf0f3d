"""LSTM and GRU blocks: torch's fused modules (cuDNN, oneDNN), but with a state that has the batch in dim 0."""

from typing import Any

import torch
from torch import Tensor, nn

from stretto.base.state import State
from stretto.base.window import Rows
from stretto.blocks.block import Block


def _layers_first(tensor: Tensor) -> Tensor:
    """Return `[batch, layers, features]` as torch's `[layers, batch, features]`, contiguous as cuDNN requires."""
    return tensor.transpose(0, 1).contiguous()


def _batch_first(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `[layers, batch, features]` as `[batch, layers, features]`, converted from autocast's dtype to `dtype`."""
    return tensor.transpose(0, 1).to(dtype)


def _run_rnn(rnn: nn.RNNBase, x: Tensor, state: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
    """Call torch's module. Under autocast on CUDA it runs in autocast's dtype."""
    if not (x.is_cuda and torch.is_autocast_enabled("cuda")):
        return rnn(x, state)  # type: ignore[no-any-return]
    # torch's autocast runs cuDNN's RNNs in fp16 even if bf16 is requested, so we cast here.
    dtype = torch.get_autocast_dtype("cuda")
    weights = {name: weight.to(dtype) for name, weight in rnn.named_parameters()}
    cast_state = state.to(dtype) if isinstance(state, Tensor) else tuple(tensor.to(dtype) for tensor in state)
    with torch.autocast("cuda", enabled=False):
        return torch.func.functional_call(rnn, weights, (x.to(dtype), cast_state))  # type: ignore[no-any-return]


class LSTM(Block):
    """An `nn.LSTM` as a block: its `num_layers` layers run in one fused call.

    State: `(h, c)`, each `[batch, layers, features]`. With `proj_size`, outputs and `h` have that many features. A
    pipeline stage holds whole blocks, so fused layers are never split between stages.
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
        h, c = state
        y, (new_h, new_c) = _run_rnn(self.cell, x, (_layers_first(h), _layers_first(c)))
        return y, (_batch_first(new_h, h.dtype), _batch_first(new_c, c.dtype))


class GRU(Block):
    """An `nn.GRU` as a block: its layers run in one fused call. State: `(h,)`, `[batch, layers, features]`."""

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, *, bias: bool = True) -> None:
        super().__init__()
        self.cell = nn.GRU(input_size, hidden_size, num_layers, bias=bias)

    def initial_state(self, rows: Rows) -> State:
        return (rows.zeros(self.cell.num_layers, self.cell.hidden_size),)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        (h,) = state
        y, new_h = _run_rnn(self.cell, x, _layers_first(h))
        return y, (_batch_first(new_h, h.dtype),)
