"""Position: a position in the global order of the data."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Position:
    """Which window comes next; independent of the number of ranks and workers, and of how far they read ahead."""

    epoch: int = 0
    pool: int = 0
    index: int = 0  # of the window in its pool

    def __str__(self) -> str:
        return f"epoch {self.epoch}, pool {self.pool}, window {self.index}"
