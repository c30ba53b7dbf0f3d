"""How the rows of a batch are split into micro-batches, and each micro-batch into chunks of time."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

RowLengths = NDArray[np.int64]
"""Lengths of rows, longest first."""


@dataclass(frozen=True)
class MicroBatchShape:
    """The rows `start:stop` of a batch, whose rows are sorted longest first, and the chunks of these rows."""

    start: int
    stop: int
    chunk_bounds: tuple[tuple[int, int], ...]  # (start, stop) of each chunk, in time steps
    rows_per_chunk: tuple[int, ...]  # number of rows in each chunk

    def chunk_shape(self, index: int) -> tuple[int, int]:
        """Return the (rows, time steps) of a chunk; (0, 0) if the micro-batch ends before it."""
        if index >= len(self.chunk_bounds):
            return 0, 0
        first, stop = self.chunk_bounds[index]
        return self.rows_per_chunk[index], stop - first

    def whole(self) -> "MicroBatchShape":
        """Return the same rows with one chunk, which has all time steps."""
        return replace(self, chunk_bounds=((0, self.chunk_bounds[-1][1]),), rows_per_chunk=(self.stop - self.start,))

    def after_stride(self, stride: int) -> "MicroBatchShape":
        """Return the shape after blocks that make one time step of each `stride`; each chunk starts at a multiple."""
        bounds = tuple((first // stride, -(-stop // stride)) for first, stop in self.chunk_bounds)
        return replace(self, chunk_bounds=bounds)


def split_rows(lengths: RowLengths, num_micro_batches: int, num_chunks: int, stride: int = 1) -> list[MicroBatchShape]:
    """Split rows, longest first, into micro-batches of nearly equal work and chunks of nearly equal length.

    There must be at least as many rows as micro-batches. A micro-batch is as long as its longest row, so a short
    one can have fewer than `num_chunks` chunks. The first chunk of a micro-batch has all its rows, even empty ones, so
    that each micro-batch has a backward; later chunks leave out the rows that have ended. Chunks start at multiples of
    `stride`.
    """
    micro_batches = []
    for start, stop in pairwise(_micro_batch_bounds(lengths, num_micro_batches)):
        num_steps = max(int(lengths[start]), 1)
        num_units = -(-num_steps // stride)
        num_own_chunks = min(num_chunks, num_units)
        edges = [num_units * index // num_own_chunks * stride for index in range(num_own_chunks)]
        chunk_bounds = tuple(pairwise([*edges, num_steps]))
        # Shortest first, so that searchsorted counts the rows that end at or before a chunk's first time step.
        ascending = lengths[start:stop][::-1]
        num_ended = np.searchsorted(ascending, [first for first, _ in chunk_bounds[1:]], side="right").tolist()
        micro_batches.append(
            MicroBatchShape(start, stop, chunk_bounds, (stop - start, *(stop - start - ended for ended in num_ended)))
        )
    return micro_batches


def _micro_batch_bounds(lengths: RowLengths, num_micro_batches: int) -> list[int]:
    """Return the first row of each micro-batch and, at the end, the number of rows; total lengths are about equal."""
    if num_micro_batches == 1:
        return [0, len(lengths)]
    # An empty row counts as one time step, since the first chunk computes it.
    sums = np.concatenate([[0], np.maximum(lengths, 1).cumsum()])
    target_sums = [int(sums[-1]) * index // num_micro_batches for index in range(1, num_micro_batches)]
    edges = [0]
    for index, edge in enumerate((np.searchsorted(sums, target_sums, side="right") - 1).tolist(), 1):
        # At least one row for this micro-batch, and one for each that follows.
        edges.append(min(max(edge, edges[-1] + 1), len(lengths) - (num_micro_batches - index)))
    return [*edges, len(lengths)]
