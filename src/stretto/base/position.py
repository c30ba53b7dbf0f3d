"""Position: names the next window in the global order of the data."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Position:
    """Which window comes next. It depends neither on the number of ranks and workers nor on how far they read ahead."""

    epoch: int = 0
    pool: int = 0  # index in the epoch; a pool is a group of sequences that are arranged together; 0 for `Lanes`
    index: int = 0  # of the window in its pool

    def __str__(self) -> str:
        return f"epoch {self.epoch}, pool {self.pool}, window {self.index}"
