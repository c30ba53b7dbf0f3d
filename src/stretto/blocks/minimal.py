"""MinGRU and MinLSTM: minimal cells, whose gates don't read the state, so that all time steps are computed at once.

L. Feng et al., "Were RNNs All We Needed?", 2024.
"""

from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from stretto.base.state import State
from stretto.base.window import Rows
from stretto.blocks.affine import AffineBlock, AffineRun, DecayMap
from stretto.blocks.linear_scan import linear_scan, linear_scan_with_early_gradient, scan_summary


class MinimalCell(AffineBlock):
    """The base of both: `h = a * h + (1 - a) * candidate`, where the gate `a` is a sigmoid. State: `(h,)`."""

    def __init__(self, input_size: int, hidden_size: int, num_maps: int, *, bias: bool = True) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.inputs = nn.Linear(input_size, num_maps * hidden_size, bias=bias)  # all gates, then the candidate

    def initial_state(self, rows: Rows) -> State:
        return (rows.zeros(self.hidden_size),)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        (h,) = state
        decay, added, dtype = self._scan_inputs(x, h.dtype)
        y, h = linear_scan(decay, added, h)
        return y.to(dtype), (h,)

    def run_affine(self, x: Tensor) -> AffineRun:
        decay, added, dtype = self._scan_inputs(x, self.inputs.weight.dtype)

        def outputs_and_state(state: State) -> tuple[Tensor, State]:
            y, h = linear_scan_with_early_gradient(decay, added, *state)
            return y.to(dtype), (h,)

        # The scan waits for the state, since it takes less time than the rest of the run; its summary does not.
        return AffineRun(
            DecayMap(*scan_summary(decay, added)), lambda state: outputs_and_state(state)[0], outputs_and_state
        )

    def _scan_inputs(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, torch.dtype]:
        """Return `a` and `(1 - a) * candidate` in the state's dtype, and the dtype of the outputs."""
        maps = self.inputs(x)
        gate, candidate = self._gate(maps.to(dtype))
        return gate.sigmoid(), (-gate).sigmoid() * candidate, maps.dtype

    @abstractmethod
    def _gate(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logit of the gate `a`, and the candidate."""


class MinGRU(MinimalCell):
    """A minimal GRU. State: `(h,)`, `[batch, features]`.

        z = sigmoid(W_z x + b_z)
        h = (1 - z) * h + z * (W_h x + b_h)

    No time step waits for another one: a window is computed with one matrix product and a scan. The model needs
    several layers to relate inputs at different times, since the gates see only the current input.
    """

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True) -> None:
        super().__init__(input_size, hidden_size, 2, bias=bias)

    def _gate(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        z, candidate = maps.chunk(2, dim=-1)
        return -z, candidate


class MinLSTM(MinimalCell):
    """A minimal LSTM. State: `(h,)`, `[batch, features]`.

        f, i = sigmoid(W_f x + b_f), sigmoid(W_i x + b_i)
        h = f / (f + i) * h + i / (f + i) * (W_h x + b_h)

    It is computed like a `MinGRU`, and has one gate more.
    """

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True) -> None:
        super().__init__(input_size, hidden_size, 3, bias=bias)

    def _gate(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        f, i, candidate = maps.chunk(3, dim=-1)
        # f / (f + i) = sigmoid(log f - log i)
        return logsigmoid(f) - logsigmoid(i), candidate
