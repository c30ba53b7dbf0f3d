"""Load: the windows that a step is made of, as lengths; what a plan has to spread over devices."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache, cached_property

import numpy as np

from stretto.base.errors import PlanError
from stretto.plan.cut import MicroBatchShape, RowLengths, cut_lengths


class Workload:
    """Some global batches of the data: for each, the lengths of its rows. The mean step has one of them."""

    def __init__(self, windows: Iterable[Sequence[int] | RowLengths], *, is_causal: bool = True) -> None:
        self.windows = [np.sort(np.asarray(window, np.int64))[::-1] for window in windows]
        self.is_causal = is_causal  # a model that looks ahead is not cut in time
        if not self.windows or min(map(len, self.windows)) == 0:
            raise PlanError("a plan needs a batch with at least one row; give other data")
        self.cut = cache(self._cut)
        self.chunks = cache(self._chunks)
        self.largest_chunk = cache(self._largest_chunk)

    @classmethod
    def of(cls, rows: int, steps: int) -> "Workload":
        """Return the load of lanes: always as many rows, always as long."""
        return cls([np.full(rows, steps)])

    @cached_property
    def tokens(self) -> float:
        """Steps of all rows, in a mean step."""
        return sum(float(window.sum()) for window in self.windows) / len(self.windows)

    @cached_property
    def num_rows(self) -> int:
        """Of the smallest batch."""
        return min(map(len, self.windows))

    @cached_property
    def max_rows(self) -> int:
        return max(map(len, self.windows))

    @cached_property
    def num_steps(self) -> int:
        """Of the longest row."""
        return max(1, *(int(window[0]) for window in self.windows))

    def _cut(self, replicas: int, micro_batches: int, chunks: int) -> list[list[MicroBatchShape]]:
        """Return, for each batch, how the replica that has most to do cuts its rows."""
        return [cut_lengths(window[::replicas], micro_batches, chunks) for window in self.windows]

    def _chunks(self, replicas: int, micro_batches: int, chunks: int) -> list[Counter[tuple[int, int]]]:
        """Return, for each batch, how many chunks there are of how many rows and steps."""
        return [
            Counter(shape.chunk(index)[::-1] for shape in window for index in range(len(shape.chunk_bounds)))
            for window in self.cut(replicas, micro_batches, chunks)
        ]

    def _largest_chunk(self, replicas: int, micro_batches: int, chunks: int) -> tuple[int, int]:
        """Return rows and steps of the largest chunk."""
        shapes = [shape for window in self.chunks(replicas, micro_batches, chunks) for shape in window]
        return max(shapes, key=lambda shape: shape[0] * shape[1])
