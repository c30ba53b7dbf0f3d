"""The workload of a plan: the lengths of the rows that each step has to distribute over devices."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache, cached_property

import numpy as np

from stretto.base.errors import PlanError
from stretto.plan.cut import MicroBatchShape, RowLengths, cut_lengths


class Workload:
    """The lengths of the rows of some global batches, which stand for all of the data."""

    def __init__(self, windows: Iterable[Sequence[int] | RowLengths], *, is_causal: bool = True) -> None:
        self.windows = [np.sort(np.asarray(window, np.int64))[::-1] for window in windows]
        self.is_causal = is_causal  # a model that looks ahead can't be split in time
        if not self.windows or min(map(len, self.windows)) == 0:
            raise PlanError("a workload needs at least one batch, and each batch at least one row; use more data")
        self.cut = cache(self._cut)
        self.count_chunks = cache(self._count_chunks)
        self.largest_chunk = cache(self._largest_chunk)

    @classmethod
    def of(cls, rows: int, steps: int) -> "Workload":
        """Return the workload of lanes: every batch has the same rows and steps."""
        return cls([np.full(rows, steps)])

    @cached_property
    def tokens(self) -> float:
        """Steps of all rows, on average per batch."""
        return sum(float(window.sum()) for window in self.windows) / len(self.windows)

    @cached_property
    def num_rows(self) -> int:
        """Rows of the smallest batch."""
        return min(map(len, self.windows))

    @cached_property
    def max_rows(self) -> int:
        """Rows of the largest batch."""
        return max(map(len, self.windows))

    @cached_property
    def num_steps(self) -> int:
        """Steps of the longest row."""
        return max(1, *(int(window[0]) for window in self.windows))

    def _cut(self, replicas: int, micro_batches: int, chunks: int) -> list[list[MicroBatchShape]]:
        """Return, for each batch, how the replica with the most work splits its rows."""
        return [cut_lengths(window[::replicas], micro_batches, chunks) for window in self.windows]

    def _count_chunks(self, replicas: int, micro_batches: int, chunks: int) -> list[Counter[tuple[int, int]]]:
        """Return, for each batch, how many chunks have which (rows, steps)."""
        return [
            Counter(shape.chunk(index)[::-1] for shape in window for index in range(len(shape.chunk_bounds)))
            for window in self.cut(replicas, micro_batches, chunks)
        ]

    def _largest_chunk(self, replicas: int, micro_batches: int, chunks: int) -> tuple[int, int]:
        """Return the (rows, steps) of the largest chunk."""
        shapes = [shape for window in self.count_chunks(replicas, micro_batches, chunks) for shape in window]
        return max(shapes, key=lambda shape: shape[0] * shape[1])
