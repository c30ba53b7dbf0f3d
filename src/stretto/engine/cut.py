"""Cut: how one window is divided into slices of rows and chunks of time; every rank of a replica finds the same."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from stretto.base.window import Window
from stretto.plan.actions import Action


@dataclass(frozen=True)
class SliceCut:
    """One slice: which rows, longest first, and how many of them are still there at each chunk.

    Longest first, so that the rows which go on are always the first ones: dropping the others is a view.

        rows   |==========|====   chunk edges at |
          0    ############            2 rows in the second chunk
          1    ##############
          2    ######                  left at the edge
    """

    rows: Tensor  # int64 [rows]: numbers of the window's rows, longest first
    is_sorted: bool  # the rows are a plain range: no need to pick them
    num_rows: tuple[int, ...]  # of each chunk


@dataclass(frozen=True)
class Cut:
    """A window's slices and chunk edges."""

    slices: tuple[SliceCut, ...]
    edges: tuple[tuple[int, int], ...]  # first step and stop of each chunk

    def shape(self, action: Action) -> tuple[int, int]:
        """Return steps and rows of what an action works on; no rows means that there is nothing to do."""
        start, stop = self.edges[action.chunk]
        return stop - start, self.slices[action.slice].num_rows[action.chunk]


def cut_window(window: Window, num_slices: int, num_chunks: int) -> Cut:
    """Cut a window into slices of nearly equal size and chunks of nearly equal length, none of them empty."""
    num_steps = window.num_steps
    num_chunks = min(num_chunks, num_steps)
    edges = tuple(pairwise(num_steps * index // num_chunks for index in range(num_chunks + 1)))
    slices = []
    for part in window.slices(num_slices):
        lengths = window.lengths[part]
        is_sorted = bool((lengths[:-1] >= lengths[1:]).all())
        numbers = torch.arange(part.start, part.stop)
        rows = numbers if is_sorted else numbers[lengths.argsort(descending=True, stable=True)]
        # All rows are there at the first chunk, empty ones too, so that each slice has a backward.
        counts = (len(numbers), *(int((lengths > start).sum()) for start, _ in edges[1:]))
        slices.append(SliceCut(rows, is_sorted, counts))
    return Cut(tuple(slices), edges)
