"""Dropout and LockedDropout: the mask is a function of position, so it is the same in every layout."""

import math

import torch
from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.base.randomness import keep_mask, mix
from stretto.base.state import State, where_rows
from stretto.base.window import Rows
from stretto.blocks.block import Block


def _lane_keys(rows: Rows) -> Tensor:
    """One key per row, from `rows.key` (which depends on seed, step and block) and the lane."""
    return mix(mix(rows.lanes) ^ rows.key).to(rows.device)


class _RandomMask(Block):
    """What both kinds of dropout share: a probability."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        if not 0 <= probability < 1:
            name = type(self).__name__
            raise ConfigError(f"{name} probability={probability} is not in [0, 1); use a value such as 0.2")
        self.probability = probability

    def extra_repr(self) -> str:
        return f"{self.probability}"


class Dropout(_RandomMask):
    """Zeroes each feature of each step with `probability`, and scales the others to keep the mean.

    The mask is a function of (seed, step, block, lane, absolute time, feature). The state is `(keys, time)`, the
    position of each row, so cutting in time or splitting rows does not change the mask.
    """

    def initial_state(self, rows: Rows) -> State:
        return _lane_keys(rows), torch.zeros(len(rows), dtype=torch.int64, device=rows.device)

    def begin(self, rows: Rows, carried: State | None = None) -> State:
        keys, time = self.initial_state(rows)
        if carried is not None:
            # Time continues in a lane that continues; the keys are those of this optimizer step.
            (time,) = where_rows(rows.fresh, (time,), carried[1:])
        return keys, time

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        keys, time = state
        num_steps = x.shape[0]
        after = (keys, time + num_steps)
        if not self.training or self.probability == 0:
            return x, after
        steps = time + torch.arange(num_steps, device=x.device).unsqueeze(1)
        keep = 1 - self.probability
        mask = keep_mask(keys ^ mix(steps), math.prod(x.shape[2:]), keep)
        return x * mask.view_as(x) * (1 / keep), after


class LockedDropout(_RandomMask):
    """Zeroes the same features at all steps of a window; each window and lane has its own mask (variational dropout).

    The mask is a function of (seed, step, block, lane, feature). The state is the keys of the rows.
    """

    def initial_state(self, rows: Rows) -> State:
        return (_lane_keys(rows),)

    def begin(self, rows: Rows, carried: State | None = None) -> State:
        return self.initial_state(rows)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        if not self.training or self.probability == 0:
            return x, state
        (keys,) = state
        keep = 1 - self.probability
        scale = keep_mask(keys, math.prod(x.shape[2:]), keep).to(x.dtype).mul_(1 / keep)
        return x * scale.view(x.shape[1:]), state
