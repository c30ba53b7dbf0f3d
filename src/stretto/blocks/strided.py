"""Strided blocks: they make one output time step of each group of input time steps, so time gets shorter.

With a stride of 2, a row of 5 time steps, in chunks of 4 and 1:

    inputs        x0  x1 | x2  x3 | x4  -        a row ends with an incomplete group; chunks end between groups
    StackFrames  [x0, x1] [x2, x3] [x4, 0]       features are those of all time steps of a group
    PoolTime      mean     mean     x4           of the valid time steps of a group

What follows a row's last time step is padding, which may hold anything, so these blocks know where a row ends.
"""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from stretto.base.device_copy import to_device
from stretto.base.errors import ConfigError
from stretto.base.state import State
from stretto.base.window import Rows
from stretto.blocks.block import Block

PoolKind = Literal["mean", "max"]


class Strided(Block):
    """The base of the strided blocks. State: `(num_left,)`, the number of valid time steps that each row still has."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        if type(stride) is not int or stride < 1:  # not isinstance: a bool is an int too
            raise ConfigError(f"{type(self).__name__} stride={stride!r} must be an integer of at least 1, such as 2")
        self.stride = stride

    def extra_repr(self) -> str:
        return f"stride={self.stride}"

    def initial_state(self, rows: Rows) -> State:
        return (to_device(rows.lengths, rows.device),)

    def begin(self, rows: Rows, carried: State | None = None) -> State:
        *state, _ = super().begin(rows, carried)
        # The carried number is of the window before; only the new one knows where a row ends in it.
        return *state, to_device(rows.lengths, rows.device)

    def advance(self, state: State, num_steps: int) -> State | None:
        *before, num_left = state
        return None if before else (num_left - num_steps,)

    def _split(self, x: Tensor, num_left: Tensor, fill: float = 0.0) -> tuple[Tensor, Tensor]:
        """Return the groups `[groups, stride, batch, ...]`, with `fill` as padding, and which time steps are valid."""
        num_steps = len(x)
        num_missing = -num_steps % self.stride
        if num_missing:
            x = torch.cat([x, x.new_zeros(num_missing, *x.shape[1:])])
        is_valid = torch.arange(len(x), device=x.device).unsqueeze(1) < num_left.clamp(max=num_steps)
        dims = (len(x) // self.stride, self.stride, x.shape[1])
        is_valid = is_valid.view(*dims, *[1] * (x.dim() - 2))
        # Not a product with a mask: the padding can be NaN.
        return x.reshape(*dims, *x.shape[2:]).masked_fill(~is_valid, fill), is_valid


class StackFrames(Strided):
    """Joins the features of each `stride` time steps into one time step; zeros complete a row's last one.

    Outputs have `stride` times as many features as inputs. It has no weights.
    """

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        (num_left,) = state
        groups, _ = self._split(x, num_left)
        return groups.transpose(1, 2).flatten(2), (num_left - len(x),)


class PoolTime(Strided):
    """The mean or the maximum of each feature over each `stride` time steps, of which only valid ones count."""

    def __init__(self, stride: int, kind: PoolKind = "mean") -> None:
        super().__init__(stride)
        if kind not in get_args(PoolKind):
            raise ConfigError(f"PoolTime kind={kind!r} is not known; choose from {', '.join(get_args(PoolKind))}")
        self.kind = kind

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, kind={self.kind!r}"

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        (num_left,) = state
        if self.kind == "mean":
            groups, is_valid = self._split(x, num_left)
            y = (groups.sum(1) / is_valid.sum(1).clamp(min=1)).to(x.dtype)
        else:
            groups, is_valid = self._split(x, num_left, fill=-torch.inf)
            # Groups after a row's end have no maximum; what follows must not see infinite values.
            y = groups.amax(1).masked_fill(~is_valid.any(1), 0.0)
        return y, (num_left - len(x),)


class CausalConv(Strided):
    """A convolution over the last `kernel_size` time steps, at the end of each `stride` time steps.

    Before a row's first time step are zeros. State: `(before, num_left)`: the last `kernel_size - stride` inputs
    `[batch, time, features]`, which the next output reads too (not if there are none), and the number of valid time
    steps that each row still has.
    """

    def __init__(
        self, in_features: int, out_features: int, kernel_size: int, stride: int = 1, *, bias: bool = True
    ) -> None:
        super().__init__(stride)
        if kernel_size < stride:
            raise ConfigError(
                f"CausalConv kernel_size={kernel_size} is less than stride={stride}, so some time steps would not be "
                f"read; use at least {stride}"
            )
        self.conv = nn.Conv1d(in_features, out_features, kernel_size, stride, bias=bias)
        self.num_kept = kernel_size - stride

    def extra_repr(self) -> str:
        return ""  # that of `conv` has the stride

    def initial_state(self, rows: Rows) -> State:
        before = (rows.zeros(self.num_kept, self.conv.in_channels),) if self.num_kept else ()
        return *before, *super().initial_state(rows)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        *before, num_left = state
        groups, _ = self._split(x, num_left)
        inputs = torch.cat([*(kept.transpose(0, 1).to(x.dtype) for kept in before), groups.flatten(0, 1)])
        # [time, batch, features] -> torch's [batch, features, time], and back
        y: Tensor = self.conv(inputs.permute(1, 2, 0)).permute(2, 0, 1).contiguous()
        after = [inputs[-self.num_kept :].transpose(0, 1).to(kept.dtype) for kept in before]
        return y, (*after, num_left - len(x))
