"""How rows of different lengths are split into micro-batches of rows and chunks of time."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

RowLengths = NDArray[np.int64]
"""Lengths of rows, longest first."""


@dataclass(frozen=True)
class MicroBatchShape:
    """The rows of a micro-batch (longest first), the steps of each chunk, and how many rows reach each chunk."""

    start: int
    stop: int
    chunk_bounds: tuple[tuple[int, int], ...]
    rows_per_chunk: tuple[int, ...]

    def chunk(self, index: int) -> tuple[int, int]:
        """Return the steps and rows of a chunk; (0, 0) if the micro-batch ends before it."""
        if index >= len(self.chunk_bounds):
            return 0, 0
        first, stop = self.chunk_bounds[index]
        return stop - first, self.rows_per_chunk[index]


def cut_lengths(lengths: RowLengths, num_micro_batches: int, num_chunks: int) -> list[MicroBatchShape]:
    """Split rows, longest first, into micro-batches of nearly equal work and chunks of nearly equal length.

    No micro-batch or chunk is empty. A micro-batch ends with its longest row. All its rows take part in the first
    chunk, even empty ones, so that each micro-batch has a backward; later chunks leave out the rows that have ended.
    """
    micro_batches = []
    for start, stop in pairwise(_micro_batch_bounds(lengths, num_micro_batches)):
        num_steps = max(int(lengths[start]), 1)
        chunks = min(num_chunks, num_steps)
        chunk_bounds = tuple(pairwise(num_steps * index // chunks for index in range(chunks + 1)))
        # Shortest first, so that searchsorted counts the rows that end at or before a chunk's first step.
        part = lengths[start:stop][::-1]
        ended = np.searchsorted(part, [first for first, _ in chunk_bounds[1:]], side="right").tolist()
        micro_batches.append(
            MicroBatchShape(start, stop, chunk_bounds, (stop - start, *(stop - start - count for count in ended)))
        )
    return micro_batches


def _micro_batch_bounds(lengths: RowLengths, num_micro_batches: int) -> list[int]:
    """Split where the sum of lengths has equal parts; each micro-batch gets at least one row."""
    if num_micro_batches == 1:
        return [0, len(lengths)]
    before = np.concatenate([[0], np.maximum(lengths, 1).cumsum()])
    # The last edge at or before each equal part, in integers.
    wanted = [int(before[-1]) * index // num_micro_batches for index in range(1, num_micro_batches)]
    edges = [0]
    for index, edge in enumerate((np.searchsorted(before, wanted, side="right") - 1).tolist(), 1):
        edges.append(min(max(edge, edges[-1] + 1), len(lengths) - (num_micro_batches - index)))
    return [*edges, len(lengths)]
