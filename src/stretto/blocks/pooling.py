"""Pooling blocks: a summary of each row up to each time step, so that a row's last step has the summary of all of it.

For a row of 3 time steps, whose one target is at its last:

    inputs    x0   x1             x2
    MeanPool  x0   mean(x0, x1)   mean(x0, x1, x2)    <- the target is here

The summary so far is the state, so these blocks satisfy the chunk law. The padding after a row's end does not matter.
"""

import torch
from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.base.state import State
from stretto.base.window import Rows
from stretto.blocks.block import Block


class Pooling(Block):
    """The base of the pooling blocks: outputs have as many features as inputs."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def extra_repr(self) -> str:
        return f"{self.num_features}"

    def _checked(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the inputs in the state's dtype: under autocast, a sum of many terms in bf16 would be too coarse."""
        if x.shape[-1] != self.num_features:
            # Torch would broadcast instead of failing if one of them were 1.
            raise ConfigError(
                f"{type(self).__name__}({self.num_features}) got {x.shape[-1]} features; set num_features to the "
                "number of features that the block before it outputs"
            )
        return x.to(dtype)


class MeanPool(Pooling):
    """The mean of a row's time steps so far; at its last time step, the mean of the row.

    State: `(total, num_steps)`: the sum so far `[batch, features]`, and the number of time steps in it.
    """

    def initial_state(self, rows: Rows) -> State:
        return rows.zeros(self.num_features), torch.zeros(len(rows), dtype=torch.int64, device=rows.device)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        total, num_steps = state
        totals = total + self._checked(x, total.dtype).cumsum(0)
        counts = num_steps + torch.arange(1, len(x) + 1, device=x.device).unsqueeze(1)  # [time, batch]
        return (totals / counts.unsqueeze(2)).to(x.dtype), (totals[-1], counts[-1])


class MaxPool(Pooling):
    """The maximum of each feature over a row's time steps so far; at its last time step, the maximum over the row.

    State: `(maximum, has_started)`: the maximum so far `[batch, features]`, and whether there is one.
    """

    def initial_state(self, rows: Rows) -> State:
        return rows.zeros(self.num_features), torch.zeros(len(rows), dtype=torch.bool, device=rows.device)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        maximum, has_started = state
        values = self._checked(x, maximum.dtype)
        before = torch.where(has_started.unsqueeze(1), maximum, values[0])
        # One `cummax` over both: of equal values, it gives the gradient to the last, whichever chunk that is in.
        maxima = torch.cat([before.unsqueeze(0), values]).cummax(0).values[1:]
        return maxima.to(x.dtype), (maxima[-1], torch.ones_like(has_started))


class FinalStates(Pooling):
    """The states in which both directions of a bidirectional block end, at a row's last time step.

    The first half of the features, the forward direction's, pass through. The second half, the backward direction's,
    are those of the row's first time step: there that direction has read the whole row. At the last time step it has
    read only one. State: `(first, has_started)`: the second half at the row's first time step, and whether it is known.
    """

    def __init__(self, num_features: int) -> None:
        if num_features % 2:
            raise ConfigError(
                f"FinalStates num_features={num_features} is odd; give it the outputs of a bidirectional block, which "
                "has as many features in each direction"
            )
        super().__init__(num_features)

    def initial_state(self, rows: Rows) -> State:
        return rows.zeros(self.num_features // 2), torch.zeros(len(rows), dtype=torch.bool, device=rows.device)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        first, has_started = state
        forward, backward = self._checked(x, first.dtype).chunk(2, dim=-1)
        first = torch.where(has_started.unsqueeze(1), first, backward[0])
        y = torch.cat([forward, first.expand_as(backward)], dim=-1)
        return y.to(x.dtype), (first, torch.ones_like(has_started))
