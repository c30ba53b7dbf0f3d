"""Lanes: a corpus cut into contiguous streams that are read window by window (Keras: a stateful batch).

corpus   |--------- lane 0 --------|--------- lane 1 --------|--------- lane 2 --------|
window 0 |----|                    |----|                    |----|                      all start fresh
window 1      |----|                    |----|                    |----|                 all continue
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.base.errors import DataError
from stretto.base.position import Position
from stretto.base.task import Task
from stretto.base.window import IGNORE_INDEX, Window
from stretto.store.corpus import Corpus
from stretto.windows.share import DividedLanes, Share


@dataclass(frozen=True)
class Lanes(DividedLanes):
    """A corpus as `lanes` streams; window k+1 of a lane continues where window k ended.

    Each token but the first is predicted once per epoch. `share` returns one replica's lanes, with global lane numbers.
    """

    corpus: Corpus
    lanes: int
    window: int
    own_share: Share | None = None  # None: all lanes, not divided among replicas

    def __post_init__(self) -> None:
        super().__post_init__()
        needed, available = self.lanes * self.window, self.num_targets
        if needed > available:
            raise DataError(
                f"lanes={self.lanes:,} x window={self.window:,} needs {needed:,} tokens per step, but "
                f"{self.corpus.location} has {available:,} to predict; use fewer lanes, a shorter window or more text"
            )

    @classmethod
    def fitting(cls, corpus: Corpus, lanes: int, window: int, min_rows: int = 1) -> Self:
        """Return lanes that fit the corpus: `window` shrinks until `min_rows` lanes fit; then `lanes` shrinks."""
        return cls(corpus, *fit_lanes(corpus.num_tokens - 1, lanes, window, min_rows))

    def __str__(self) -> str:
        return f"{self.lanes:,} lanes x window {self.window:,}, {self.num_windows:,} windows per epoch"

    @property
    def task(self) -> Task:
        return Task.language(len(self.corpus.vocabulary))

    @property
    def num_targets(self) -> int:
        """The number of tokens that are predicted in an epoch."""
        return self.corpus.num_tokens - 1

    @property
    def bytes_per_token(self) -> float:
        return self.corpus.num_bytes / self.corpus.num_tokens

    @property
    def _longest(self) -> int:
        """The number of time steps of the last lane, which is the longest; the others are at most one shorter."""
        return -(-self.num_targets // self.lanes)

    @property
    def num_windows(self) -> int:
        """The number of windows in an epoch; the last one may be shorter."""
        return -(-self._longest // self.window)

    def position(self, index: int) -> Position:
        """Return the position of window `index`, counted from the start of the first epoch."""
        return Position(index // self.num_windows, 0, index % self.num_windows)

    def next_position(self, position: Position) -> Position:
        """Return the position of the window after the one at `position`."""
        return self.position(position.epoch * self.num_windows + position.index + 1)

    def fraction(self, position: Position) -> float:
        """Return what fraction of the epoch lies before a position."""
        return position.index / self.num_windows

    def read(self, position: Position, *, inputs: bool = True, targets: bool = True) -> Window:
        """Return the window at a position, in O(1): windows before it are not read.

        `inputs=False` or `targets=False` skips what a stage does not use; lengths and lane numbers are always returned.
        """
        index = position.index
        if position.pool or not 0 <= index < self.num_windows:
            raise DataError(f"{position} does not exist: an epoch has one pool, with {self.num_windows} windows")
        # The longest lane counts, even if it is in another share: all shares' windows have the same `num_steps`.
        num_steps = min(self.window, self._longest - index * self.window)
        lanes = np.array(self.lane_indices)
        starts = self.num_targets * lanes // self.lanes + index * self.window
        lengths = (self.num_targets * (lanes + 1) // self.lanes - starts).clip(0, num_steps)
        tokens = self._tokens(starts, num_steps) if inputs or targets else None
        return Window(
            num_steps=num_steps,
            lanes=torch.from_numpy(lanes),
            lengths=torch.from_numpy(lengths),
            fresh=torch.full((len(lanes),), index == 0),
            inputs=tokens[:-1] if tokens is not None and inputs else None,
            targets=_mask_ended(tokens[1:], lengths) if tokens is not None and targets else None,
        )

    def _tokens(self, starts: NDArray[np.int64], num_steps: int) -> torch.Tensor:
        """Return each lane's tokens `[num_steps + 1, lanes]`; the targets are the inputs shifted by one."""
        # A lane one token shorter than the longest reads into the next lane; `_mask_ended` removes that target. The
        # last lane is never shorter, so nothing is read beyond the end of the corpus.
        return torch.from_numpy(self.corpus.gather(starts, num_steps + 1).T.copy())


def _mask_ended(targets: torch.Tensor, lengths: NDArray[np.int64]) -> torch.Tensor:
    """Set the targets of time steps after the end of a lane to IGNORE_INDEX."""
    num_steps = len(targets)
    if lengths.min() == num_steps:
        return targets
    ended = torch.arange(num_steps).unsqueeze(1) >= torch.from_numpy(lengths)
    return targets.masked_fill(ended, IGNORE_INDEX)


def fit_lanes(num_steps: int, lanes: int, window: int, min_rows: int) -> tuple[int, int]:
    """Return `lanes` and `window`, reduced to fit `num_steps`: `window` until `min_rows` lanes fit, then `lanes`."""
    window = max(1, min(window, num_steps // min_rows))
    return max(1, min(lanes, num_steps // window)), window
