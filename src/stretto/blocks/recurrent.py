"""LSTM and GRU: torch's fused modules (cuDNN, oneDNN) with a state that has the batch in dim 0."""

from typing import Any

import torch
from torch import Tensor, nn

from stretto.base.state import State
from stretto.base.window import Rows
from stretto.blocks.block import Block


def _to_cell(tensor: Tensor) -> Tensor:
    """[batch, layers, features] -> [layers, batch, features], contiguous as cuDNN requires."""
    return tensor.transpose(0, 1).contiguous()


def _from_cell(tensor: Tensor, like: Tensor) -> Tensor:
    """[layers, batch, features] -> [batch, layers, features]; the state keeps its dtype under autocast."""
    return tensor.transpose(0, 1).to(like.dtype)


def _run_cell(cell: nn.RNNBase, x: Tensor, state: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
    """Call a cell; under autocast on CUDA, in autocast's dtype."""
    if not (x.is_cuda and torch.is_autocast_enabled("cuda")):
        return cell(x, state)  # type: ignore[no-any-return]
    # Torch's autocast runs cuDNN's RNNs in fp16 even if bf16 is requested, so we cast here.
    dtype = torch.get_autocast_dtype("cuda")
    weights = {name: weight.to(dtype) for name, weight in cell.named_parameters()}
    cast = state.to(dtype) if isinstance(state, Tensor) else tuple(tensor.to(dtype) for tensor in state)
    with torch.autocast("cuda", enabled=False):
        return torch.func.functional_call(cell, weights, (x.to(dtype), cast))  # type: ignore[no-any-return]


class LSTM(Block):
    """LSTM with `num_layers` layers fused in one call, as `nn.LSTM`.

    State: `(h, c)`, each `[batch, layers, features]`. With `proj_size`, outputs and `h` have that many features. A
    pipeline stage holds whole blocks, so fused layers are never split between stages.
    """

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, *, proj_size: int = 0, bias: bool = True
    ) -> None:
        super().__init__()
        self.cell = nn.LSTM(input_size, hidden_size, num_layers, bias=bias, proj_size=proj_size)

    def initial_state(self, rows: Rows) -> State:
        cell = self.cell
        h = rows.zeros(cell.num_layers, cell.proj_size or cell.hidden_size)
        return h, rows.zeros(cell.num_layers, cell.hidden_size)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        h, c = state
        y, (h_after, c_after) = _run_cell(self.cell, x, (_to_cell(h), _to_cell(c)))
        return y, (_from_cell(h_after, h), _from_cell(c_after, c))


class GRU(Block):
    """GRU with `num_layers` layers fused in one call, as `nn.GRU`. State: `(h,)`, `[batch, layers, features]`."""

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, *, bias: bool = True) -> None:
        super().__init__()
        self.cell = nn.GRU(input_size, hidden_size, num_layers, bias=bias)

    def initial_state(self, rows: Rows) -> State:
        return (rows.zeros(self.cell.num_layers, self.cell.hidden_size),)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        (h,) = state
        y, h_after = _run_cell(self.cell, x, _to_cell(h))
        return y, (_from_cell(h_after, h),)
