"""MLSTM: the mLSTM of the xLSTM, whose memory is a matrix per head; all time steps of a chunk are computed at once.

M. Beck et al., "xLSTM: Extended Long Short-Term Memory", 2024. The exponential input gate can be huge, so everything is
kept divided by `exp(m)`. `m` cancels out of all outputs, so gradients need not flow through it.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from stretto.base.errors import ConfigError
from stretto.base.state import State
from stretto.base.window import Rows
from stretto.blocks.affine import AffineBlock, AffineMap, AffineRun

# Time steps that are computed at once: all pairs of them, as in attention.
_CHUNK_STEPS = 64
# Outputs are divided by at least exp(-m). A larger exponent could overflow, a smaller one leave a division by zero.
_MAX_EXPONENT = 60.0


def check_heads(name: str, hidden_size: int, num_heads: int) -> int:
    """Return the number of features of a head; raise if the heads can't have the same number."""
    if num_heads < 1 or hidden_size % num_heads:
        raise ConfigError(
            f"{name} num_heads={num_heads} does not divide hidden_size={hidden_size}; choose a number that does"
        )
    return hidden_size // num_heads


class ExponentialGates(nn.Linear):
    """The input and forget gates of all heads. They start independent of the input, and forget little: 5% to 0.2%."""

    def __init__(self, input_size: int, num_heads: int) -> None:
        super().__init__(input_size, 2 * num_heads)

    def reset_parameters(self) -> None:
        """Draw the biases of the input gates; all other weights are fixed."""
        input_bias, forget_bias = self.bias.data.chunk(2)
        nn.init.zeros_(self.weight)
        nn.init.normal_(input_bias, std=0.1)
        forget_bias.copy_(torch.linspace(3.0, 6.0, len(forget_bias)))


class _Inputs(NamedTuple):
    """What the cell computes from `x`: `[batch, heads, time, features]`, and `[batch, heads, time]` for the gates."""

    query: Tensor
    key: Tensor
    value: Tensor
    input_gate: Tensor  # its logarithm
    forget_gate: Tensor  # its logarithm

    def chunks(self) -> list["_Inputs"]:
        """Split the time."""
        parts = [torch.split(tensor, _CHUNK_STEPS, dim=2) for tensor in self]
        return [_Inputs(*chunk) for chunk in zip(*parts, strict=True)]


@dataclass(frozen=True)
class _Readout:
    """What queries read from the memory, divided by `exp(m)`: values `[batch, heads, time, features]` and norms."""

    values: Tensor
    norms: Tensor  # [batch, heads, time]
    m: Tensor  # [batch, heads, time]

    def normalized(self) -> Tensor:
        """Return `values / max(|norms|, 1)`, as if they were not divided by `exp(m)`."""
        one = (-self.m).clamp(-_MAX_EXPONENT, _MAX_EXPONENT).exp()
        return self.values / torch.maximum(self.norms.abs(), one).unsqueeze(-1)

    def add(self, query: Tensor, log_decay: Tensor, state: State) -> "_Readout":
        """Add what queries read from an earlier state, of which `exp(log_decay)` is left."""
        c, n, m_before = state
        log_scale = log_decay + m_before.unsqueeze(-1)
        m = torch.maximum(log_scale.detach(), self.m)
        own, earlier = (self.m - m).exp(), (log_scale - m).exp()
        values = own.unsqueeze(-1) * self.values + earlier.unsqueeze(-1) * (query @ c)
        return _Readout(values, own * self.norms + earlier * (query @ n.unsqueeze(-1)).squeeze(-1), m)


@dataclass(frozen=True)
class MatrixMap(AffineMap):
    """`C = decay * C + C_added` and `n = decay * n + n_added`, with a decay per head, all divided by `exp(m)`."""

    log_decay: Tensor  # [batch, heads]
    added: State  # (C, n, m) after the stretch if C and n before it are zero

    @property
    def tensors(self) -> State:
        return self.log_decay, *self.added

    def with_tensors(self, tensors: State) -> Self:
        return type(self)(tensors[0], tensors[1:])

    def __call__(self, state: State) -> State:
        (c, n, m_before), (c_added, n_added, m_added) = state, self.added
        log_scale = self.log_decay + m_before
        m = torch.maximum(log_scale.detach(), m_added)
        own, earlier = (m_added - m).exp().unsqueeze(-1), (log_scale - m).exp().unsqueeze(-1)
        c = earlier.unsqueeze(-1) * c + own.unsqueeze(-1) * c_added
        return c, earlier * n + own * n_added, m

    def then(self, later: Self) -> Self:
        return type(self)(self.log_decay + later.log_decay, later(self.added))


class MLSTM(AffineBlock):
    """The mLSTM: a memory of keys and values, read by queries. For each head:

        q, v, o = W_q x + b_q, W_v x + b_v, sigmoid(W_o x + b_o);  k = (W_k x + b_k) / sqrt(features of a head)
        i, f = exp(w_i x + b_i), sigmoid(w_f x + b_f)
        C = f * C + i * k v^T;  n = f * n + i * k
        h = o * (q C) / max(|q n|, 1)

    State: `(C, n, m)`: `[batch, heads, features, features]`, `[batch, heads, features]` and `[batch, heads]`, where `C`
    and `n` are divided by `exp(m)`. The state is `features` times as large as an LSTM's. The cost of a window grows
    linearly with its length: within 64 time steps, all pairs are computed as in attention.
    """

    def __init__(self, input_size: int, hidden_size: int, num_heads: int = 4) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.num_heads = input_size, hidden_size, num_heads
        self.head_size = check_heads(type(self).__name__, hidden_size, num_heads)
        self.inputs = nn.Linear(input_size, 4 * hidden_size)  # q, k, v, o
        self.gates = ExponentialGates(input_size, num_heads)  # i, f

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"

    def initial_state(self, rows: Rows) -> State:
        heads, size = self.num_heads, self.head_size
        return rows.zeros(heads, size, size), rows.zeros(heads, size), rows.zeros(heads)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        inputs, output_gate = self._project(x, state[0].dtype)
        values = []
        for chunk in inputs.chunks():
            log_decay = chunk.forget_gate.cumsum(-1)
            values.append(_read_chunk(chunk, log_decay).add(chunk.query, log_decay, state).normalized())
            state = _chunk_map(chunk, log_decay)(state)
        return self._output(torch.cat(values, dim=2), output_gate), state

    def run_affine(self, x: Tensor) -> AffineRun:
        inputs, output_gate = self._project(x, self.inputs.weight.dtype)
        readouts, log_decays = [], []
        state_map: MatrixMap | None = None
        for chunk in inputs.chunks():
            log_decay = chunk.forget_gate.cumsum(-1)
            readout, chunk_map = _read_chunk(chunk, log_decay), _chunk_map(chunk, log_decay)
            if state_map is not None:
                readout = readout.add(chunk.query, log_decay, state_map.added)
                log_decay = log_decay + state_map.log_decay.unsqueeze(-1)
            readouts.append(readout)
            log_decays.append(log_decay)
            state_map = chunk_map if state_map is None else state_map.then(chunk_map)
        parts = [(readout.values, readout.norms, readout.m) for readout in readouts]
        local = _Readout(*(torch.cat(tensors, dim=2) for tensors in zip(*parts, strict=True)))
        all_log_decays = torch.cat(log_decays, dim=2)  # from the start of the stretch

        def outputs(state: State) -> Tensor:
            return self._output(local.add(inputs.query, all_log_decays, state).normalized(), output_gate)

        assert state_map is not None
        return AffineRun(state_map, outputs)

    def _project(self, x: Tensor, dtype: torch.dtype) -> tuple[_Inputs, Tensor]:
        """Return the cell's inputs in the state's dtype, and the output gates `[time, batch, hidden]`."""
        maps = self.inputs(x)
        # [time, batch, hidden] -> [batch, heads, time, features]
        query, key, value = (
            part.to(dtype).unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0, 3)
            for part in maps[..., : -self.hidden_size].chunk(3, dim=-1)
        )
        input_gate, forget_gate = self.gates(x).to(dtype).permute(1, 2, 0).chunk(2, dim=1)
        inputs = _Inputs(query, key * self.head_size**-0.5, value, input_gate, logsigmoid(forget_gate))
        return inputs, maps[..., -self.hidden_size :].sigmoid()

    def _output(self, values: Tensor, output_gate: Tensor) -> Tensor:
        """Return the outputs `[time, batch, hidden]`."""
        return output_gate * values.permute(2, 0, 1, 3).flatten(2).to(output_gate.dtype)


def _read_chunk(chunk: _Inputs, log_decay: Tensor) -> _Readout:
    """Return what the queries of a chunk read from its own time steps; `log_decay` is that since its start."""
    # Query t reads key s with the weight exp(own[t, s]): the input gate of s, times the forget gates after s up to t.
    offsets = chunk.input_gate - log_decay
    m = (log_decay + offsets.cummax(-1).values).detach()
    is_later = torch.ones(log_decay.shape[-1], log_decay.shape[-1], dtype=torch.bool, device=log_decay.device).triu(1)
    log_weights = (log_decay - m).unsqueeze(-1) + offsets.unsqueeze(-2)
    scores = (chunk.query @ chunk.key.mT) * log_weights.masked_fill(is_later, -torch.inf).exp()
    return _Readout(scores @ chunk.value, scores.sum(-1), m)


def _chunk_map(chunk: _Inputs, log_decay: Tensor) -> MatrixMap:
    """Return what a chunk does to the state."""
    log_total = log_decay[..., -1:]
    log_weights = log_total - log_decay + chunk.input_gate
    m = log_weights.detach().amax(-1, keepdim=True)
    weighted_key = chunk.key * (log_weights - m).exp().unsqueeze(-1)
    added = weighted_key.mT @ chunk.value, weighted_key.sum(-2), m.squeeze(-1)
    return MatrixMap(log_total.squeeze(-1), added)
