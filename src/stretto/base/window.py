"""Rows and windows: who is in a batch, and the stretch of time that one optimizer step sees."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from stretto.base.keys import derive_key

IGNORE_INDEX = -100
"""The target of a step that is asked for no token; torch's own default."""
# Longer than any window: a row whose end is not in sight.
_UNBOUNDED = 2**62


@dataclass(frozen=True)
class Rows:
    """The rows a block is about to meet, and the key from which their randomness is derived.

    The three tensors stay on the CPU, where lengths are needed; states are made on `device`.
    """

    lanes: Tensor  # int64 [batch]: a row's place in the global batch, whichever rank holds it
    lengths: Tensor  # int64 [batch]: how many steps of the window are valid
    fresh: Tensor  # bool [batch]: starts from the initial state, whatever came before
    key: int
    device: torch.device
    dtype: torch.dtype  # of the model's weights, and so of real-valued states

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
        """Return fresh rows of one length (the whole window's, if not given), as a test or a script needs them."""
        return cls(
            lanes=torch.arange(num_rows, device="cpu"),
            lengths=torch.full((num_rows,), _UNBOUNDED if num_steps is None else num_steps, device="cpu"),
            fresh=torch.ones(num_rows, dtype=torch.bool, device="cpu"),
            key=key,
            device=torch.device(device),
            dtype=torch.get_default_dtype() if dtype is None else dtype,
        )

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros `[batch, *shape]` in the model's dtype on its device: what most states start from."""
        return torch.zeros(len(self), *shape, dtype=self.dtype, device=self.device)

    def __len__(self) -> int:
        return len(self.lanes)

    def for_block(self, index: int) -> Self:
        """Return the same rows as the block at `index` sees them: with a key of its own."""
        return replace(self, key=derive_key(self.key, index))

    def __getitem__(self, rows: slice | Tensor) -> Self:
        return replace(self, lanes=self.lanes[rows], lengths=self.lengths[rows], fresh=self.fresh[rows])


@dataclass(frozen=True)
class Window:
    """One stretch of time for some rows; time-major, so that a chunk of it is a contiguous view.

    Who is in it is known everywhere; the payload may be left out where it isn't used. Where nothing is asked (padding,
    or an unlabeled step) the target says so: the ignore index for whole numbers, NaN for real ones.
    """

    num_steps: int
    lanes: Tensor  # int64 [batch]
    lengths: Tensor  # int64 [batch]
    fresh: Tensor  # bool [batch]
    inputs: Tensor | None = None  # [time, batch, ...]
    targets: Tensor | None = None  # [time, batch, ...]

    @property
    def num_rows(self) -> int:
        """How many rows it has."""
        return len(self.lanes)

    @property
    def num_valid(self) -> int:
        """How many of its steps times rows belong to a row that has not ended."""
        return int(self.lengths.clamp(max=self.num_steps).sum())

    def rows(self, key: int, device: torch.device, dtype: torch.dtype) -> Rows:
        """Return who is in this window, for blocks on `device` with weights of `dtype`."""
        return Rows(self.lanes, self.lengths, self.fresh, key, device, dtype)

    def micro_batches(self, num_micro_batches: int) -> list[slice]:
        """Return the row ranges of `num_micro_batches` micro-batches whose sizes differ by at most one row."""
        edges = [self.num_rows * index // num_micro_batches for index in range(num_micro_batches + 1)]
        return [slice(start, stop) for start, stop in pairwise(edges)]

    def pin_memory(self) -> Self:
        """Return the same window with its payload where a GPU copies from without waiting."""
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
        )
