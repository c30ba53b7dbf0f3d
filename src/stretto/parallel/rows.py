"""Rows of different lengths in packed order, as in torch's PackedSequence: step by step, the longest row first.

Three rows of 4, 1 and 3 steps, in order of rows and in packed order; with two chunks the cut is between steps 1 and 2:

    a0 a1 a2 a3  b0  c0 c1 c2                 a0 c0 b0  a1 c1 | a2 c2  a3

So a chunk is a slice, the rows that are alive at a step are the first ones, and a row that has ended takes part in no
message and no arithmetic.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True)
class Chunk:
    """A slice of time of packed rows."""

    steps: slice  # of the packed order
    sizes: Tensor  # rows alive at each of its times, never more than before
    num_rows: int  # alive at its beginning
    rows: Tensor  # of each step
    times: Tensor  # of each step

    @property
    def num_steps(self) -> int:
        return int(self.steps.stop - self.steps.start)

    @cached_property
    def is_full(self) -> bool:
        """Whether these rows are alive in all of it."""
        return self.num_steps == self.num_rows * len(self.sizes)


class Packing:
    """The packed order of rows with these lengths."""

    def __init__(self, lengths: Tensor, order: Tensor | None = None) -> None:
        self.lengths = lengths
        self.order = torch.argsort(lengths, descending=True, stable=True) if order is None else order  # longest first
        self.place = torch.argsort(self.order)  # of each row in that order
        num_times = int(lengths.max()) if len(lengths) else 0
        is_alive = lengths[self.order] > torch.arange(num_times)[:, None]  # [times, rows]
        self.sizes = is_alive.sum(1)
        self.times, place = is_alive.nonzero(as_tuple=True)
        self.rows = self.order[place]
        starts = lengths.cumsum(0) - lengths
        self.index = starts[self.rows] + self.times  # packed order from order of rows: packed = values[index]
        self.back = torch.argsort(self.index)  # order of rows from packed order

    def chunks(self, count: int) -> list[Chunk]:
        """Cut time into at most `count` chunks of about the same number of times."""
        chunks, start = [], 0
        for sizes in torch.split(self.sizes, max(1, -(-len(self.sizes) // count))):
            steps = slice(start, start + int(sizes.sum()))
            chunks.append(Chunk(steps, sizes, int(sizes.max()), self.rows[steps], self.times[steps]))
            start = steps.stop
        return chunks


def unpack(packed: PackedSequence) -> tuple[Tensor, Packing]:
    """Return the values of a PackedSequence in order of rows, [sum of lengths, width], and its packing."""
    num_rows = int(packed.batch_sizes[0]) if len(packed.batch_sizes) else 0
    order = torch.arange(num_rows) if packed.sorted_indices is None else packed.sorted_indices.cpu()
    lengths = torch.empty(num_rows, dtype=torch.int64)
    lengths[order] = (packed.batch_sizes[:, None] > torch.arange(num_rows)).sum(0)
    packing = Packing(lengths, order)
    return packed.data[packing.back.to(packed.data.device)], packing
