"""Dropout whose mask is a function of position, so that every layout draws the same one."""

import math

import torch
from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.base.randomness import keep_mask, mix
from stretto.base.state import State, where_rows
from stretto.base.window import Rows
from stretto.blocks.block import Block


def _lane_keys(rows: Rows) -> Tensor:
    """One key a row from (seed, step, block), which `rows.key` holds, and the lane."""
    return mix(mix(rows.lanes) ^ rows.key).to(rows.device)


def _check(probability: float, name: str) -> None:
    if not 0 <= probability < 1:
        raise ConfigError(f"{name} probability={probability} is not in [0, 1); use a value such as 0.2")


class Dropout(Block):
    """Zeroes each feature of each step with `probability`, and scales the rest to keep the mean.

    The mask is a function of (seed, step, block, lane, absolute time, feature). Its state is where each
    row stands: `(keys, time)`, so cutting in time or splitting rows can't change it.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        _check(probability, "Dropout")
        self.probability = probability

    def extra_repr(self) -> str:
        return f"{self.probability}"

    def initial_state(self, rows: Rows) -> State:
        return _lane_keys(rows), torch.zeros(len(rows), dtype=torch.int64, device=rows.device)

    def begin(self, rows: Rows, carried: State | None = None) -> State:
        keys, time = self.initial_state(rows)
        if carried is not None:
            # Time goes on in a lane that goes on; the keys are this step's.
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


class LockedDropout(Block):
    """Zeroes the same features at every step of a window, anew in each window and lane.

    The mask is a function of (seed, step, block, lane, feature). Its state is the rows' keys.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        _check(probability, "LockedDropout")
        self.probability = probability

    def extra_repr(self) -> str:
        return f"{self.probability}"

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
