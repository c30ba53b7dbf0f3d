"""Cut: how rows of unequal length are divided into slices of rows and chunks of time."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]
"""Of rows, longest first."""


@dataclass(frozen=True)
class SliceShape:
    """Which of the rows, longest first; the steps of its chunks; and how many rows are still there at each."""

    start: int
    stop: int
    edges: tuple[tuple[int, int], ...]
    num_rows: tuple[int, ...]

    def chunk(self, index: int) -> tuple[int, int]:
        """Return steps and rows of a chunk; no rows where the slice has ended before."""
        if index >= len(self.edges):
            return 0, 0
        first, stop = self.edges[index]
        return stop - first, self.num_rows[index]


def cut_lengths(lengths: Lengths, num_slices: int, num_chunks: int) -> list[SliceShape]:
    """Cut rows, longest first, into slices of nearly equal work and chunks of nearly equal length, none of them empty.

    A slice ends with its longest row. All its rows are there at the first chunk, empty ones too, so that each slice
    has a backward; after that, rows leave where they have ended.
    """
    slices = []
    for start, stop in pairwise(_slice_edges(lengths, num_slices)):
        num_steps = max(int(lengths[start]), 1)
        chunks = min(num_chunks, num_steps)
        edges = tuple(pairwise(num_steps * index // chunks for index in range(chunks + 1)))
        # Shortest first, to be searched for those that end at or before a chunk's first step.
        part = lengths[start:stop][::-1]
        ended = np.searchsorted(part, [first for first, _ in edges[1:]], side="right").tolist()
        slices.append(SliceShape(start, stop, edges, (stop - start, *(stop - start - gone for gone in ended))))
    return slices


def _slice_edges(lengths: Lengths, num_slices: int) -> list[int]:
    """Cut where the sum of lengths is in equal parts; each slice has a row at least."""
    if num_slices == 1:
        return [0, len(lengths)]
    before = np.concatenate([[0], np.maximum(lengths, 1).cumsum()])
    # The last edge at or before an equal part, in whole numbers.
    wanted = [int(before[-1]) * index // num_slices for index in range(1, num_slices)]
    edges = [0]
    for index, edge in enumerate((np.searchsorted(before, wanted, side="right") - 1).tolist(), 1):
        edges.append(min(max(edge, edges[-1] + 1), len(lengths) - (num_slices - index)))
    return [*edges, len(lengths)]
