"""Cut: how one window is divided into micro-batches of rows and chunks of time; every rank of a replica finds the same."""

from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.base.window import Window
from stretto.plan.actions import Action
from stretto.plan.cut import MicroBatchShape, cut_lengths


@dataclass(frozen=True)
class MicroBatchCut:
    """One micro-batch: which rows, longest first, its chunks of time, and how many rows are still there at each.

    Longest first, so that the rows which go on are always the first ones: dropping the others is a view. A micro-batch ends
    with its longest row, whatever the window's other rows do.

        rows   |==========|====   chunk edges at |
          0    ##############          2 rows in the second chunk
          1    ############
          2    ######                  left at the edge
    """

    rows: Tensor  # int64 [rows]: numbers of the window's rows, longest first
    is_sorted: bool  # the rows are a plain range: no need to pick them
    shape: MicroBatchShape

    @property
    def chunk_bounds(self) -> tuple[tuple[int, int], ...]:
        """First step and stop of each chunk; a short micro-batch may have fewer than others."""
        return self.shape.chunk_bounds

    @property
    def rows_per_chunk(self) -> tuple[int, ...]:
        """Of each chunk."""
        return self.shape.rows_per_chunk


@dataclass(frozen=True)
class WindowCut:
    """A window's micro-batches, each with its chunks."""

    micro_batches: tuple[MicroBatchCut, ...]

    @property
    def num_chunks(self) -> int:
        """The chunks of the micro-batch that has most."""
        return max(len(part.chunk_bounds) for part in self.micro_batches)

    def shape(self, action: Action) -> tuple[int, int]:
        """Return steps and rows of what an action works on; no rows means that there is nothing to do."""
        return self.micro_batches[action.micro_batch].shape.chunk(action.chunk)


def cut_window(window: Window, num_micro_batches: int, num_chunks: int) -> WindowCut:
    """Cut a window into micro-batches of nearly equal work and chunks of nearly equal length, none of them empty."""
    lengths = window.lengths.clamp(max=window.num_steps)
    is_sorted = bool((lengths[:-1] >= lengths[1:]).all())
    rows = torch.arange(len(lengths)) if is_sorted else lengths.argsort(descending=True, stable=True)
    shapes = cut_lengths(lengths[rows].numpy(), num_micro_batches, num_chunks)
    return WindowCut(tuple(MicroBatchCut(rows[shape.start : shape.stop], is_sorted, shape) for shape in shapes))
