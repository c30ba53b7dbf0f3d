"""SLSTM: the sLSTM of the xLSTM, an LSTM with exponential gates, a normalizer, and recurrent weights within heads.

M. Beck et al., "xLSTM: Extended Long Short-Term Memory", 2024. `c` and `n` are kept divided by `exp(m)`, which cancels
out of the outputs, so gradients need not flow through `m`.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from stretto.base.state import State
from stretto.base.window import Rows
from stretto.blocks.block import Block
from stretto.blocks.matrix_lstm import check_heads


class GateInputs(nn.Linear):
    """The part of all gates that depends on the input; the forget gates start with biases from 3 to 6."""

    def __init__(self, input_size: int, num_heads: int, head_size: int) -> None:
        self.num_heads = num_heads
        super().__init__(input_size, num_heads * 4 * head_size)

    def reset_parameters(self) -> None:
        """Draw the weights as `nn.Linear` does, except for the biases of the forget gates."""
        super().reset_parameters()
        forget_bias = self.bias.data.view(self.num_heads, 4, -1)[:, 1]
        forget_bias.copy_(torch.linspace(3.0, 6.0, forget_bias.numel()).view_as(forget_bias))


class SLSTM(Block):
    """The sLSTM. Each head `h` of the features has recurrent weights of its own:

        i, f, z, o = W x + R h + b, for all gates
        c = sigmoid(f) * c + exp(i) * tanh(z);  n = sigmoid(f) * n + exp(i)
        h = sigmoid(o) * c / n

    State: `(h, c, n, m)`, each `[batch, features]`, where `c` and `n` are divided by `exp(m)`. Time steps run one after
    the other, as in an LSTM, but as separate operations: it is the slowest of the cells.
    """

    def __init__(self, input_size: int, hidden_size: int, num_heads: int = 4) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.num_heads = input_size, hidden_size, num_heads
        self.head_size = check_heads(type(self).__name__, hidden_size, num_heads)
        self.inputs = GateInputs(input_size, num_heads, self.head_size)  # for each head: i, f, z, o
        self.weight_hh = nn.Parameter(torch.empty(num_heads, self.head_size, 4 * self.head_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the recurrent weights as `nn.LSTM` does for a layer of the size of a head."""
        nn.init.uniform_(self.weight_hh, -(self.head_size**-0.5), self.head_size**-0.5)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"

    def initial_state(self, rows: Rows) -> State:
        return tuple(rows.zeros(self.hidden_size) for _ in range(4))

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        maps = self.inputs(x)
        dtype = state[0].dtype
        # [time, batch, heads * 4 * features] -> [time, heads, batch, 4 * features]
        gates = maps.to(dtype).unflatten(-1, (self.num_heads, -1)).transpose(1, 2).contiguous()
        # [batch, features] -> [heads, batch, features of a head]
        h, c, n, m = (torch.unflatten(tensor, -1, (self.num_heads, -1)).transpose(0, 1) for tensor in state)
        # Only before a row's first time step is n zero. There is nothing to scale yet, so the first m is that of i.
        m = m.masked_fill(n == 0, -torch.inf)
        weight = self.weight_hh.to(dtype)
        outputs = []
        for step in gates.unbind():
            i, f, z, o = torch.baddbmm(step, h, weight).chunk(4, dim=-1)
            log_f = logsigmoid(f) + m
            m = torch.maximum(i, log_f).detach()
            i, f = (i - m).exp(), (log_f - m).exp()
            c = f * c + i * z.tanh()
            n = f * n + i
            h = o.sigmoid() * c / n
            outputs.append(h)
        y = torch.stack(outputs).transpose(1, 2).flatten(2)
        after = tuple(tensor.transpose(0, 1).flatten(1).to(dtype) for tensor in (h, c, n, m))
        return y.to(maps.dtype), after
