"""Resets: where the rows of a chunk start again from their initial state, because an episode or document has ended."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stretto.base.window import Rows


@dataclass(frozen=True)
class Resets:
    """The resets of a chunk, and its rows as they are at its first time step.

    A chunk can be run in pieces, each of which begins like a window of its own: the rows that have just ended an
    episode are fresh, and the others carry their state.

        time ->   0  1  2  3  4  5  6  7          `ends` is true at (2, row 0) and (5, row 1)
        row 0     a  a  a |b  b  b |b  b          three pieces: 0 to 2, 3 to 5, 6 and 7
        row 1     c  c  c |c  c  c |d  d
    """

    rows: Rows
    ends: Tensor  # bool [time, batch], on the CPU: true at the last time step of an episode

    @property
    def pieces(self) -> Iterator[tuple[slice, Rows | None]]:
        """The time steps of each piece, and the rows right after it; None if none of them starts again there."""
        stops = [index + 1 for index in torch.nonzero(self.ends.any(1)).squeeze(1).tolist()]
        start = 0
        for stop in stops:
            yield slice(start, stop), self.rows_after(stop)
            start = stop
        if start < len(self.ends):
            yield slice(start, len(self.ends)), None

    def rows_after(self, num_steps: int) -> Rows:
        """Return the rows after some time steps: those that end an episode with the last of them are fresh."""
        return replace(self.rows, lengths=self.rows.lengths - num_steps, fresh=self.ends[num_steps - 1])

    def for_block(self, index: int) -> "Resets":
        """Return the same resets for the block at `index`."""
        return replace(self, rows=self.rows.for_block(index))
