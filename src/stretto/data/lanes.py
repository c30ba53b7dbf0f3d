"""Lanes: a corpus cut into contiguous streams, read one window after the other.

corpus   |--------- lane 0 --------|--------- lane 1 --------|--------- lane 2 --------|
window 0 |----|                    |----|                    |----|                      all fresh
window 1      |----|                    |----|                    |----|                 go on
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from stretto.base.errors import DataError
from stretto.base.window import IGNORE, Window
from stretto.data.corpus import Corpus


@dataclass(frozen=True)
class Lanes:
    """A corpus as `lanes` streams; window k+1 of a lane goes on where window k ended.

    Each token but the first is predicted exactly once an epoch. Lanes know nothing of ranks: `share` hands
    out a contiguous part of them, and lane numbers stay global.
    """

    corpus: Corpus
    lanes: int
    window: int
    first: int = 0
    stop: int | None = None  # none: up to the last lane

    def __post_init__(self) -> None:
        if self.lanes < 1 or self.window < 1:
            raise DataError(f"lanes={self.lanes} and window={self.window} must both be at least 1")
        asked, there = self.lanes * self.window, self.num_predicted
        if asked > there:
            raise DataError(
                f"lanes={self.lanes:,} x window={self.window:,} asks for {asked:,} tokens a step, but "
                f"{self.corpus.folder} has {max(there, 0):,} to predict; use fewer lanes, a shorter window or more text"
            )

    @classmethod
    def fitting(cls, corpus: Corpus, lanes: int, window: int) -> Self:
        """Return at most that many lanes of at most that window: as many as the corpus can fill."""
        there = max(1, corpus.num_tokens - 1)
        window = min(window, there)
        return cls(corpus, min(lanes, there // window), window)

    def share(self, index: int, count: int) -> Self:
        """Return part `index` of `count` of the lanes; sizes differ by at most one lane."""
        if not 0 <= index < count <= self.lanes:
            raise DataError(f"share {index} of {count} needs 0 <= index < count <= lanes={self.lanes}")
        return replace(self, first=self.lanes * index // count, stop=self.lanes * (index + 1) // count)

    @property
    def num_predicted(self) -> int:
        return self.corpus.num_tokens - 1

    @property
    def bytes_per_token(self) -> float:
        return self.corpus.num_bytes / self.corpus.num_tokens

    @property
    def numbers(self) -> range:
        """The global numbers of the lanes of this share."""
        return range(self.first, self.lanes if self.stop is None else self.stop)

    @property
    def _longest(self) -> int:
        """Steps of the longest lane; all others are at most one shorter."""
        return -(-self.num_predicted // self.lanes)

    @property
    def num_windows(self) -> int:
        """How many windows an epoch has, the last of them maybe a short one."""
        return -(-self._longest // self.window)

    def read(self, position: int) -> Window:
        """Return the window at `position`, counted from the first of the first epoch: an O(1) seek."""
        index = position % self.num_windows
        spans = [self._span(lane, index) for lane in self.numbers]
        # Of the whole batch, not of this share: every share sees windows of the same shape.
        num_steps = min(self.window, self._longest - index * self.window)
        # One row a lane here, turned time-major once at the end.
        inputs = np.zeros((len(spans), num_steps), np.int64)
        targets = np.full((len(spans), num_steps), IGNORE, np.int64)
        for row, (start, stop) in enumerate(spans):
            tokens = self.corpus.read(start, stop + 1)
            inputs[row, : stop - start] = tokens[:-1]
            targets[row, : stop - start] = tokens[1:]
        return Window(
            inputs=torch.from_numpy(inputs).t().contiguous(),
            targets=torch.from_numpy(targets).t().contiguous(),
            lanes=torch.tensor(self.numbers),
            lengths=torch.tensor([stop - start for start, stop in spans]),
            fresh=torch.full((len(spans),), index == 0),
        )

    def _span(self, lane: int, index: int) -> tuple[int, int]:
        """Where window `index` of a lane starts and stops in the corpus; empty where the lane has ended."""
        lane_start = self.num_predicted * lane // self.lanes
        lane_stop = self.num_predicted * (lane + 1) // self.lanes
        start = min(lane_start + index * self.window, lane_stop)
        return start, min(start + self.window, lane_stop)
