"""WindowCut: how a window is cut into micro-batches (rows) and chunks (time); the same on every rank of a replica."""

from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.base.window import Window
from stretto.plan.actions import Action
from stretto.plan.micro_batches import MicroBatchShape, split_rows


@dataclass(frozen=True)
class MicroBatchCut:
    """One micro-batch: its rows, longest first, its chunks, and the number of rows in each chunk.

    Rows that have ended are dropped where the next chunk begins. With the longest first, the remaining rows are always
    the first ones, so a slice selects them. A micro-batch ends with its longest row, even in a longer window.

        time ->     chunk 0     chunk 1          rows_per_chunk = (3, 2)
        row 5      |#########|#########|
        row 2      |#########|####     |
        row 7      |####     |                   dropped after chunk 0
    """

    rows: Tensor  # int64 [rows]: indices of the window's rows, longest first
    is_sorted: bool  # the window's rows are already in this order, so a slice selects the micro-batch
    shape: MicroBatchShape  # a short micro-batch may have fewer chunks than others


@dataclass(frozen=True)
class WindowCut:
    """The micro-batches of a window, each with its chunks."""

    micro_batches: tuple[MicroBatchCut, ...]

    @property
    def num_chunks(self) -> int:
        """The largest number of chunks that a micro-batch has."""
        return max(len(micro_batch.shape.chunk_bounds) for micro_batch in self.micro_batches)

    def dims(self, action: Action) -> tuple[int, int]:
        """Return (time steps, rows) of an action's chunk, as in tensors; (0, 0) if the micro-batch ends before it."""
        num_rows, num_steps = self.micro_batches[action.micro_batch].shape.chunk_shape(action.chunk)
        return num_steps, num_rows


def cut_window(window: Window, num_micro_batches: int, num_chunks: int) -> WindowCut:
    """Cut a window into micro-batches of about equal work and chunks of about equal length, none of them empty."""
    lengths = window.lengths.clamp(max=window.num_steps)
    is_sorted = bool((lengths[:-1] >= lengths[1:]).all())
    rows = torch.arange(len(lengths)) if is_sorted else lengths.argsort(descending=True, stable=True)
    shapes = split_rows(lengths[rows].numpy(), num_micro_batches, num_chunks)
    return WindowCut(tuple(MicroBatchCut(rows[shape.start : shape.stop], is_sorted, shape) for shape in shapes))
