"""Rows and windows: the rows of a batch, and the time steps that one training step sees."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from stretto.base.device_copy import to_device
from stretto.base.keys import derive_key
from stretto.base.task import IGNORE_INDEX as IGNORE_INDEX

_UNBOUNDED = 2**62  # the length of a row that does not end; longer than any window


@dataclass(frozen=True)
class Rows:
    """The rows of a batch as a block sees them, and the key from which their randomness is derived.

    The three tensors stay on the CPU; states are created on `device`.
    """

    lanes: Tensor  # int64 [batch]: global index of the row's lane; without lanes, of the row in the global batch
    lengths: Tensor  # int64 [batch]: number of valid time steps in the window; a larger value means all of them
    fresh: Tensor  # bool [batch]: starts from the initial state, not from the previous window's
    key: int
    device: torch.device
    dtype: torch.dtype  # of the model's weights, and so of floating-point states

    @classmethod
    def of(
        cls,
        num_rows: int,
        num_steps: int | None = None,
        *,
        key: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Return fresh rows that all have `num_steps` valid time steps, by default the whole window."""
        return cls(
            lanes=torch.arange(num_rows, device="cpu"),
            lengths=torch.full((num_rows,), _UNBOUNDED if num_steps is None else num_steps, device="cpu"),
            fresh=torch.ones(num_rows, dtype=torch.bool, device="cpu"),
            key=key,
            device=torch.device(device),
            dtype=torch.get_default_dtype() if dtype is None else dtype,
        )

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros `[batch, *shape]` in the model's dtype and on its device: the usual initial state."""
        return torch.zeros(len(self), *shape, dtype=self.dtype, device=self.device)

    def __len__(self) -> int:
        return len(self.lanes)

    def for_block(self, index: int) -> Self:
        """Return the same rows with the key of the block at `index`."""
        return replace(self, key=derive_key(self.key, index))

    def after_stride(self, stride: int) -> Self:
        """Return the same rows with their lengths after blocks that make one time step of each `stride`."""
        return self if stride == 1 else replace(self, lengths=-(-self.lengths // stride))

    def __getitem__(self, rows: slice | Tensor) -> Self:
        return replace(self, lanes=self.lanes[rows], lengths=self.lengths[rows], fresh=self.fresh[rows])


@dataclass(frozen=True)
class Window:
    """Some time steps of some rows; time-major, so that a chunk is a contiguous view.

    `lanes`, `lengths` and `fresh` are as in `Rows`. `inputs` and `targets` are None on ranks that don't need them. A
    time step without a target (padding, or unlabeled) has the target IGNORE_INDEX; in floating-point targets, NaN.
    Targets of a loss over whole rows may have a length of their own, then padding. `resets` is true where an episode or
    document ends: the time step after it, in this window or the next, starts from the initial state.
    """

    num_steps: int  # the number of time steps, padding included
    lanes: Tensor  # int64 [batch]
    lengths: Tensor  # int64 [batch]
    fresh: Tensor  # bool [batch]
    inputs: Tensor | None = None  # [time, batch, ...]
    targets: Tensor | None = None  # [time, batch, ...]; [length, batch] if targets have a length of their own
    resets: Tensor | None = None  # bool [time, batch], on the CPU: the state after this time step is the initial one

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.lanes)

    @property
    def num_valid(self) -> int:
        """The number of valid time steps, summed over all rows."""
        return int(self.lengths.clamp(max=self.num_steps).sum())

    def rows(self, key: int, device: torch.device, dtype: torch.dtype) -> Rows:
        """Return the rows of this window, for blocks on `device` with weights of `dtype`."""
        return Rows(self.lanes, self.lengths, self.fresh, key, device, dtype)

    def micro_batches(self, num_micro_batches: int) -> list[slice]:
        """Split the rows evenly into ranges (sizes differ by at most 1), for `LocalEngine`; others balance the work."""
        edges = [self.num_rows * index // num_micro_batches for index in range(num_micro_batches + 1)]
        return [slice(start, stop) for start, stop in pairwise(edges)]

    def pin_memory(self) -> Self:
        """Return the same window with inputs and targets in pinned memory, for asynchronous copies to a GPU."""
        return replace(
            self,
            inputs=None if self.inputs is None else self.inputs.pin_memory(),
            targets=None if self.targets is None else self.targets.pin_memory(),
        )

    def __getitem__(self, rows: slice) -> Self:
        return replace(
            self,
            lanes=self.lanes[rows],
            lengths=self.lengths[rows],
            fresh=self.fresh[rows],
            inputs=None if self.inputs is None else self.inputs[:, rows],
            targets=None if self.targets is None else self.targets[:, rows],
            resets=None if self.resets is None else self.resets[:, rows],
        )

    def select(self, rows: Tensor) -> Self:
        """Return a copy with the rows at these indices (int64, on the CPU), in that order."""
        return replace(
            self,
            lanes=self.lanes[rows],
            lengths=self.lengths[rows],
            fresh=self.fresh[rows],
            inputs=None if self.inputs is None else self.inputs.index_select(1, to_device(rows, self.inputs.device)),
            targets=None
            if self.targets is None
            else self.targets.index_select(1, to_device(rows, self.targets.device)),
            resets=None if self.resets is None else self.resets.index_select(1, rows),
        )
