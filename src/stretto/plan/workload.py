"""Workload: the lengths of the rows that each training step distributes over the replicas."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np

from stretto.base.errors import PlanError
from stretto.plan.micro_batches import MicroBatchShape, RowLengths, split_rows


class Workload:
    """The row lengths of some global batches that represent all of the data; each batch is one training step.

    `stride` is the model's: chunks start at multiples of it. Without `can_cut_time`, a layout has neither chunks nor
    spans, because metrics need the outputs of whole rows at once. If windows carry state (lanes), it has no spans.
    """

    def __init__(
        self,
        batches: Iterable[Sequence[int] | RowLengths],
        *,
        is_causal: bool = True,
        stride: int = 1,
        can_cut_time: bool = True,
        carries_state: bool = False,
    ) -> None:
        self.batches = [np.sort(np.asarray(lengths, np.int64))[::-1] for lengths in batches]
        self.is_causal = is_causal  # False for a model that looks ahead, which can't be split in time
        self.stride = stride
        self.can_cut_time = can_cut_time
        if not self.batches or min(map(len, self.batches)) == 0:
            raise PlanError("a workload needs at least one batch, and each batch at least one row; use more data")
        sizes = [len(lengths) for lengths in self.batches]
        # Rows of the smallest batch, which limits replicas and micro-batches, and of the largest.
        self.min_rows, self.max_rows = min(sizes), max(sizes)
        self.num_steps = max(1, *(int(lengths[0]) for lengths in self.batches))  # time steps of the longest row
        self.num_outputs = -(-self.num_steps // stride)  # of the longest row
        self.max_chunks = self.num_outputs if is_causal and can_cut_time else 1
        self.max_spans = self.num_outputs if can_cut_time and not carries_state else 1
        # The time steps of all rows of an average batch.
        self.tokens = sum(float(lengths.sum()) for lengths in self.batches) / len(self.batches)
        self.split = cache(self._split)  # a cache per instance, unlike @cache
        self.count_chunks = cache(self._count_chunks)
        self.largest_chunk = cache(self._largest_chunk)

    @classmethod
    def of(cls, rows: int, steps: int) -> "Workload":
        """Return a workload in which every batch has `rows` rows of `steps` time steps, as with stateful lanes."""
        return cls([np.full(rows, steps)])

    def _split(self, replicas: int, micro_batches: int, chunks: int) -> list[list[MicroBatchShape]]:
        """Return, for each batch, the micro-batches of the busiest replica: every `replicas`-th row, longest first."""
        return [split_rows(lengths[::replicas], micro_batches, chunks, self.stride) for lengths in self.batches]

    def _count_chunks(self, replicas: int, micro_batches: int, chunks: int) -> list[Counter[tuple[int, int]]]:
        """Return, for each batch, the number of chunks with each (rows, time steps)."""
        return [
            Counter(shape.chunk_shape(index) for shape in shapes for index in range(len(shape.chunk_bounds)))
            for shapes in self.split(replicas, micro_batches, chunks)
        ]

    def _largest_chunk(self, replicas: int, micro_batches: int, chunks: int) -> tuple[int, int]:
        """Return the (rows, time steps) of the largest chunk."""
        shapes = [shape for counts in self.count_chunks(replicas, micro_batches, chunks) for shape in counts]
        return max(shapes, key=lambda shape: shape[0] * shape[1])
