"""MinGRU and MinLSTM: minimal cells, whose gates don't read the state, so that all time steps are computed at once.

L. Feng et al., "Were RNNs All We Needed?", 2024.
"""

from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from stretto.base.device_copy import to_device
from stretto.base.resets import Resets
from stretto.base.state import State
from stretto.base.window import Rows
from stretto.blocks.affine import AffineBlock, AffineRun, DecayMap
from stretto.blocks.cast_weights import has_hooks
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
        return self._scan(x, state, None)

    def run_with_resets(self, x: Tensor, state: State, resets: Resets) -> tuple[Tensor, State]:
        return self._scan(x, state, resets) if self._resets_by_decay else super().run_with_resets(x, state, resets)

    def run_affine(self, x: Tensor) -> AffineRun:
        return self._run_affine(x, None)

    def run_affine_with_resets(self, x: Tensor, resets: Resets) -> AffineRun:
        return self._run_affine(x, resets) if self._resets_by_decay else super().run_affine_with_resets(x, resets)

    @property
    def _resets_by_decay(self) -> bool:
        """Whether a reset is a decay of zero; a subclass may have another initial state or `forward`."""
        return type(self) in (MinGRU, MinLSTM) and not has_hooks(self)

    def _scan(self, x: Tensor, state: State, resets: Resets | None) -> tuple[Tensor, State]:
        (h,) = state
        decay, added, dtype = self._scan_inputs(x, h.dtype, resets)
        y, h = linear_scan(decay, added, h)
        return y.to(dtype), (_clear_ended(h, resets),)

    def _run_affine(self, x: Tensor, resets: Resets | None) -> AffineRun:
        decay, added, dtype = self._scan_inputs(x, self.inputs.weight.dtype, resets)

        def outputs_and_state(state: State) -> tuple[Tensor, State]:
            y, h = linear_scan_with_early_gradient(decay, added, *state)
            return y.to(dtype), (_clear_ended(h, resets),)

        # The scan waits for the state, since it takes less time than the rest of the run; its summary does not.
        summary = (_clear_ended(tensor, resets) for tensor in scan_summary(decay, added))
        return AffineRun(DecayMap(*summary), lambda state: outputs_and_state(state)[0], outputs_and_state)

    def _scan_inputs(self, x: Tensor, dtype: torch.dtype, resets: Resets | None) -> tuple[Tensor, Tensor, torch.dtype]:
        """Return `a`, 0 after a reset, and `(1 - a) * candidate` in the state's dtype, and the dtype of the outputs."""
        maps = self.inputs(x)
        gate, candidate = self._gate(maps.to(dtype))
        decay = gate.sigmoid()
        if resets is not None and bool(resets.ends.any()):
            starts = torch.cat([torch.zeros_like(resets.ends[:1]), resets.ends[:-1]])
            decay = decay.masked_fill(to_device(starts, x.device).unsqueeze(-1), 0.0)
        return decay, (-gate).sigmoid() * candidate, maps.dtype

    @abstractmethod
    def _gate(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logit of the gate `a`, and the candidate."""


def _clear_ended(tensor: Tensor, resets: Resets | None) -> Tensor:
    """Return `[batch, features]` with zeros in the rows whose episode ends with the last time step."""
    if resets is None or not bool(resets.ends[-1].any()):
        return tensor
    return tensor.masked_fill(to_device(resets.ends[-1], tensor.device).unsqueeze(-1), 0.0)


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
