"""ActivationPenalty: passes its input on, and adds the gradient of a penalty on it."""

from typing import Any

import torch
from torch import Tensor

from stretto.base.device_copy import to_device
from stretto.base.errors import ConfigError
from stretto.base.state import State
from stretto.base.window import Rows
from stretto.blocks.block import Block
from stretto.blocks.losses import full_precision


class ActivationPenalty(Block):
    """Makes activations small (`activation`) and slow (`temporal`); put it after a recurrent block.

    The penalty of a time step is `activation` times the mean square of its features, plus `temporal` times the mean
    square of their change since the step before. Like the loss, it is summed over the valid time steps and divided by
    the number of targets, and its gradient is part of the step's. It is not in the loss that is reported, and has no
    effect in evaluations. State: `(last, time, end)`: the features of the last time step, the number of time steps
    since the row was fresh, and how many of them are valid up to the end of the window.
    """

    def __init__(self, num_features: int, *, activation: float = 0.0, temporal: float = 0.0) -> None:
        super().__init__()
        for name, value in (("activation", activation), ("temporal", temporal)):
            if not 0 <= value < float("inf"):
                raise ConfigError(f"ActivationPenalty {name}={value} must be finite and at least 0; use 1 or 2")
        self.num_features, self.activation, self.temporal = num_features, activation, temporal

    def extra_repr(self) -> str:
        return f"{self.num_features}, activation={self.activation}, temporal={self.temporal}"

    def initial_state(self, rows: Rows) -> State:
        time = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        return rows.zeros(self.num_features), time, to_device(rows.lengths, rows.device)

    def begin(self, rows: Rows, carried: State | None = None) -> State:
        last, time, _ = super().begin(rows, carried)
        # Lengths count from the start of the window. The carried end is not used: a length beyond the window's end, of
        # the window before, says only that the row had not ended there.
        return last, time, time + to_device(rows.lengths, rows.device)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        last, time, end = state
        if not len(x):
            return x, state
        new_state = (x[-1].to(last.dtype), time + len(x), end)
        if not self.training or not torch.is_grad_enabled() or not x.requires_grad:
            return x, new_state
        y: Tensor = _AddGradient.apply(x, self._penalty(x, state))  # type: ignore[no-untyped-call]
        return y, new_state

    def _penalty(self, x: Tensor, state: State) -> Tensor:
        """Return the penalty of some time steps, summed."""
        last, time, end = state
        x = full_precision(x)
        costs = self.activation * x.square().mean(dim=-1)  # [time, batch]
        if self.temporal:
            # The first step of a row has no change.
            before = torch.where((time > 0).unsqueeze(1), last.to(x.dtype), x[0])
            change = x - torch.cat([before.unsqueeze(0), x[:-1]])
            costs = costs + self.temporal * change.square().mean(dim=-1)
        times = time + torch.arange(len(x), device=x.device).unsqueeze(1)
        return costs.masked_fill(times >= end, 0.0).sum()


class _AddGradient(torch.autograd.Function):
    """Returns `x`; in the backward, the gradient of `penalty` is added to that of what follows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, penalty: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(penalty)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        (penalty,) = ctx.saved_tensors
        return gradients[0], torch.ones_like(penalty)
