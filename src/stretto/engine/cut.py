"""Cut: how one window is divided into slices of rows and chunks of time; every rank of a replica finds the same."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from stretto.base.window import Window
from stretto.plan.actions import Action


@dataclass(frozen=True)
class SliceCut:
    """One slice: which rows, longest first, its chunks of time, and how many rows are still there at each.

    Longest first, so that the rows which go on are always the first ones: dropping the others is a view. A slice ends
    with its longest row, whatever the window's other rows do.

        rows   |==========|====   chunk edges at |
          0    ##############          2 rows in the second chunk
          1    ############
          2    ######                  left at the edge
    """

    rows: Tensor  # int64 [rows]: numbers of the window's rows, longest first
    is_sorted: bool  # the rows are a plain range: no need to pick them
    edges: tuple[tuple[int, int], ...]  # first step and stop of each chunk; a short slice may have fewer than others
    num_rows: tuple[int, ...]  # of each chunk


@dataclass(frozen=True)
class Cut:
    """A window's slices, each with its chunks."""

    slices: tuple[SliceCut, ...]

    @property
    def num_chunks(self) -> int:
        """The chunks of the slice that has most."""
        return max(len(part.edges) for part in self.slices)

    def shape(self, action: Action) -> tuple[int, int]:
        """Return steps and rows of what an action works on; no rows means that there is nothing to do."""
        part = self.slices[action.slice]
        if action.chunk >= len(part.edges):
            return 0, 0
        start, stop = part.edges[action.chunk]
        return stop - start, part.num_rows[action.chunk]


def cut_window(window: Window, num_slices: int, num_chunks: int) -> Cut:
    """Cut a window into slices of nearly equal work and chunks of nearly equal length, none of them empty."""
    lengths = window.lengths.clamp(max=window.num_steps)
    is_sorted = bool((lengths[:-1] >= lengths[1:]).all())
    rows = torch.arange(len(lengths)) if is_sorted else lengths.argsort(descending=True, stable=True)
    lengths = lengths[rows]
    slices = []
    for start, stop in pairwise(_slice_edges(lengths, num_slices)):
        part = lengths[start:stop]
        num_steps = max(int(part[0]), 1)
        chunks = min(num_chunks, num_steps)
        edges = tuple(pairwise(num_steps * index // chunks for index in range(chunks + 1)))
        # All rows are there at the first chunk, empty ones too, so that each slice has a backward.
        counts = (len(part), *(int((part > first).sum()) for first, _ in edges[1:]))
        slices.append(SliceCut(rows[start:stop], is_sorted, edges, counts))
    return Cut(tuple(slices))


def _slice_edges(lengths: Tensor, num_slices: int) -> list[int]:
    """Cut rows, longest first, where the sum of their lengths is in equal parts; each slice has a row at least."""
    before = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.clamp(min=1).cumsum(0)])
    wanted = before[-1] * torch.arange(num_slices + 1)
    edges: list[int] = (torch.searchsorted(before * num_slices, wanted, right=True) - 1).tolist()
    for index in range(1, num_slices):
        edges[index] = min(max(edges[index], edges[index - 1] + 1), len(lengths) - (num_slices - index))
    return edges
