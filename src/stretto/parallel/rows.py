"""Rows of different lengths in packed order, as in torch's PackedSequence: step by step, the longest row first.

Three rows of 4, 1 and 3 steps, in order of rows and in packed order; with two chunks the cut is between steps 1 and 2:

    a0 a1 a2 a3  b0  c0 c1 c2                 a0 c0 b0  a1 c1 | a2 c2  a3

So a chunk is a slice, the rows that are alive at a step are the first ones, and a row that has ended takes part in no
message and no arithmetic. Most calls have even rows, all of one length: then packed order is plain [time, rows].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from stretto.base.device_copy import to_device


@dataclass(frozen=True)
class Chunk:
    """A slice of time of packed rows."""

    steps: slice  # of the packed order
    sizes: Tensor  # rows alive at each of its times, never more than before
    start: int = 0  # its first time

    @property
    def num_steps(self) -> int:
        return int(self.steps.stop - self.steps.start)

    @cached_property
    def num_rows(self) -> int:
        """How many rows are alive at its beginning."""
        return int(self.sizes[0])

    @cached_property
    def is_full(self) -> bool:
        """Whether these rows are alive in all of it."""
        return self.num_steps == self.num_rows * len(self.sizes)


class Packing:
    """The packed order of the rows of several ranks; `lengths` has those of the first rank first."""

    def __init__(self, lengths: Sequence[Tensor], *, is_even: bool | None = None) -> None:
        self.num_rows = [len(each) for each in lengths]  # of each rank
        self.lengths = torch.cat([*lengths])
        self.num_times = int(self.lengths.max()) if len(self.lengths) else 0
        self.is_even = bool((self.lengths == self.num_times).all()) if is_even is None else is_even
        self.order = torch.argsort(self.lengths, descending=True, stable=True)  # the longest row first
        self._indices: dict[tuple[str, torch.device], Tensor] = {}  # copied to a device once

    @cached_property
    def _is_alive(self) -> Tensor:  # [times, rows]
        return self.lengths[self.order] > torch.arange(self.num_times)[:, None]

    @cached_property
    def sizes(self) -> Tensor:
        """How many rows are alive at each time."""
        return self._is_alive.sum(1)

    @cached_property
    def times_and_rows(self) -> tuple[Tensor, Tensor]:
        """The time and the row of each step of packed order."""
        times, place = self._is_alive.nonzero(as_tuple=True)
        return times, self.order[place]

    @cached_property
    def _starts(self) -> Tensor:
        """Where each row starts in values row by row."""
        return self.lengths.cumsum(0) - self.lengths

    def _make_index(self, name: str) -> Tensor:
        """Return an index; in the example above, with rows a, b, c and values a0 a1 a2 a3 b0 c0 c1 c2:"""
        times, rows = self.times_and_rows
        if name == "packed":  # 0 5 4 1 6 2 7 3: packed = values[index]
            return self._starts[rows] + times
        if name == "values":  # 0 3 5 7 2 1 4 6: values = packed[index]
            return torch.argsort(self._make_index("packed"))
        if name == "turned":  # 7 6 2 5 4 3 1 0: the packed step of the same row that is as far from its end
            return self._make_index("values")[self._starts[rows] + self.lengths[rows] - 1 - times]
        if name in ("times", "rows"):  # of each packed step
            return times if name == "times" else rows
        return torch.argsort(self.order) if name == "unsorted" else self.order

    def index(self, name: str, device: torch.device) -> Tensor:
        """Return an index on a device."""
        if (name, device) not in self._indices:
            self._indices[name, device] = to_device(self._make_index(name), device)
        return self._indices[name, device]

    def _permute(self, tensor: Tensor, index: str, back: str) -> Tensor:
        device = tensor.device
        return permute(tensor, self.index(index, device), self.index(back, device))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the values of all ranks from those of each (`Inputs.values`)."""
        return torch.cat([*parts], 1 if self.is_even else 0)

    def unjoin(self, values: Tensor) -> list[Tensor]:
        """Return the values of each rank."""
        return [*(torch.split(values, self.num_rows, 1) if self.is_even else torch.split(values, self.num_steps))]

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        """Return steps in packed order [steps, ...] from the values of each rank."""
        values = self.join(parts)
        return values.flatten(0, 1) if self.is_even else self._permute(values, "packed", "values")

    def unpack(self, steps: Tensor) -> list[Tensor]:
        """Return the values of each rank from steps in packed order."""
        if self.is_even:
            return self.unjoin(torch.unflatten(steps, 0, (self.num_times, len(self.lengths))))
        return self.unjoin(self._permute(steps, "values", "packed"))

    def turn(self, steps: Tensor) -> Tensor:
        """Return steps in packed order with the time of each row reversed: from its last step to its first."""
        if self.is_even:
            return torch.unflatten(steps, 0, (self.num_times, len(self.lengths))).flip(0).flatten(0, 1)
        return self._permute(steps, "turned", "turned")

    def slice(self, start: int, stop: int) -> "Packing":
        """Return the packing of these rows' steps between two times."""
        lengths = self.lengths.clamp(start, stop) - start
        return Packing(torch.split(lengths, self.num_rows), is_even=self.is_even)

    def deal(self, count: int) -> list["Packing"]:
        """Return the packings of at most so many groups of neighboring rows."""
        dealt = torch.tensor_split(self.lengths, min(count, len(self.lengths)))
        return [Packing([lengths], is_even=self.is_even) for lengths in dealt]

    def split_rows(self, values: Tensor, groups: Sequence["Packing"]) -> Sequence[Tensor]:
        """Return the values of each group of neighboring rows, from those of all."""
        if self.is_even:
            return torch.split(values, [len(group.lengths) for group in groups], 1)
        return torch.split(values, [sum(group.num_steps) for group in groups])

    @property
    def num_steps(self) -> list[int]:
        """The number of steps of all rows of each rank."""
        return [int(each.sum()) for each in torch.split(self.lengths, self.num_rows)]

    def values_shape(self, rank: int, *shape: int) -> Sequence[int]:
        """Return the shape of the values of a rank: [times, rows, ...], or [steps, ...] if rows are not even."""
        return (self.num_times, self.num_rows[rank], *shape) if self.is_even else (self.num_steps[rank], *shape)

    def state_shape(self, rank: int, *shape: int) -> Sequence[int]:
        """Return the shape of a state tensor of a rank."""
        return (self.num_rows[rank], *shape)

    def sort_rows(self, parts: Sequence[Tensor]) -> Tensor:
        """Return a tensor [rows, width] of the ranks' rows, the longest row first."""
        rows = torch.cat([*parts])
        return rows if self.is_even else self._permute(rows, "sorted", "unsorted")

    def unsort_rows(self, rows: Tensor) -> list[Tensor]:
        """Return the rows of each rank from the rows with the longest one first."""
        rows = rows if self.is_even else self._permute(rows, "unsorted", "sorted")
        return [*torch.split(rows, self.num_rows)]

    def chunks(self, count: int) -> list[Chunk]:
        """Cut time into at most `count` chunks of about the same number of times."""
        chunks, start, time = [], 0, 0
        for sizes in torch.tensor_split(self.sizes, min(count, len(self.sizes)) or 1):
            steps = slice(start, start + int(sizes.sum()))
            chunks.append(Chunk(steps, sizes, time))
            start, time = steps.stop, time + len(sizes)
        return chunks


def permute(values: Tensor, index: Tensor, back: Tensor) -> Tensor:
    """Return `values[index]`, for an index that has each number once; `back` is its inverse."""
    permuted: Tensor = _Permute.apply(values, index, back)  # type: ignore[no-untyped-call]
    return permuted


class _Permute(torch.autograd.Function):
    """Autograd's own backward of an index would add, slowly."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, back: Tensor) -> Tensor:  # noqa: ANN401
        ctx.back = back
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        (gradient,) = gradients
        return gradient.index_select(0, ctx.back), None, None


def packing_of(packed: PackedSequence) -> Packing:
    """Return the packing of one rank's PackedSequence, whose rows are sorted."""
    num_rows = int(packed.batch_sizes[0]) if len(packed.batch_sizes) else 0
    return Packing([(packed.batch_sizes[:, None] > torch.arange(num_rows)).sum(0)], is_even=False)
