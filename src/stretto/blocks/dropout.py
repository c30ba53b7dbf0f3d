"""Dropout and LockedDropout, whose masks are derived from keys, and so are the same in every layout."""

import math

import torch
from torch import Tensor

from stretto.base.device_copy import to_device
from stretto.base.errors import ConfigError
from stretto.base.randomness import keep_mask, mix
from stretto.base.state import State, where_rows
from stretto.base.window import Rows
from stretto.blocks.block import Block
from stretto.blocks.fused_dropout import fused_dropout, has_kernel


def _lane_keys(rows: Rows) -> Tensor:
    """Return one key per row, from its lane and from `rows.key`, which depends on seed, training step and block."""
    return to_device(mix(mix(rows.lanes) ^ rows.key), rows.device)


class _DropoutBase(Block):
    """The base of both dropout blocks: holds and checks the probability."""

    remembers = False

    def __init__(self, probability: float) -> None:
        super().__init__()
        if not 0 <= probability < 1:
            name = type(self).__name__
            raise ConfigError(f"{name} probability={probability} is not in [0, 1); use a value such as 0.2")
        self.probability = probability

    def extra_repr(self) -> str:
        return f"{self.probability}"


class Dropout(_DropoutBase):
    """Zeroes each feature of each time step with `probability`, and scales the others to keep the mean.

    The mask is a function of (seed, training step, block, lane, time steps since the row was fresh, feature), however
    time and rows are split. The state is `(keys, time)`: each row's key and the index of its next time step.
    """

    def initial_state(self, rows: Rows) -> State:
        return _lane_keys(rows), torch.zeros(len(rows), dtype=torch.int64, device=rows.device)

    def begin(self, rows: Rows, carried: State | None = None) -> State:
        keys, time = self.initial_state(rows)
        if carried is not None:
            # The lanes that continue keep counting their time steps; the keys are new in every training step.
            (time,) = where_rows(rows.fresh, (time,), carried[1:])
        return keys, time

    def advance(self, state: State, num_steps: int) -> State:
        keys, time = state
        return keys, time + num_steps

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        keys, time = state
        num_steps = x.shape[0]
        new_state = (keys, time + num_steps)
        if not self.training or self.probability == 0:
            return x, new_state
        keep = 1 - self.probability
        if has_kernel(x):
            return fused_dropout(x, keys, time, keep), new_state
        time_steps = time + torch.arange(num_steps, device=x.device).unsqueeze(1)  # [time, batch]
        mask = keep_mask(keys ^ mix(time_steps), math.prod(x.shape[2:]), keep)
        return x * mask.view_as(x) * (1 / keep), new_state


class LockedDropout(_DropoutBase):
    """Variational dropout: zeroes the same features at all time steps of a window, with one mask per window and lane.

    The mask is a function of (seed, training step, block, lane, feature). The state is each row's key.
    """

    def __init__(self, probability: float) -> None:
        super().__init__(probability)
        self._scales: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (keys, scale) of the window's micro-batches

    def initial_state(self, rows: Rows) -> State:
        return (_lane_keys(rows),)

    def begin(self, rows: Rows, carried: State | None = None) -> State:
        self._scales.clear()  # all micro-batches of a window begin before the first chunk
        return self.initial_state(rows)  # carries nothing: the keys are new in every training step

    def advance(self, state: State, num_steps: int) -> State:
        return state

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        if not self.training or self.probability == 0:
            return x, state
        (keys,) = state
        if has_kernel(x):
            return fused_dropout(x, keys, None, 1 - self.probability), state
        return (x * self._scale(x, keys)).to(x.dtype), state

    def _scale(self, x: Tensor, keys: Tensor) -> Tensor:
        """Return what each row's features are multiplied by; it is computed once, in the first chunk of a window."""
        # The chunks pass views of the same keys, and the dict keeps the keys alive, so a storage identifies them.
        place = (keys.untyped_storage()._cdata, int(keys.storage_offset()))
        _, scale = self._scales.get(place) or (keys, None)
        dtype = torch.promote_types(x.dtype, torch.float32)  # in bf16 it would be off by up to 0.4%
        if scale is None or len(scale) < len(keys) or scale.dtype != dtype or scale.shape[1:] != x.shape[2:]:
            keep = 1 - self.probability
            mask = keep_mask(keys, math.prod(x.shape[2:]), keep)
            scale = mask.to(dtype).mul_(1 / keep).view(x.shape[1:])
            self._scales[place] = (keys, scale)
        return scale[: len(keys)]
