"""Position: a place in the global order of the data, in three whole numbers."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Position:
    """Which window comes next. It means the same for any number of ranks and workers, however far they read ahead."""

    epoch: int = 0
    pool: int = 0
    index: int = 0  # of the window in its pool

    def __str__(self) -> str:
        return f"epoch {self.epoch}, pool {self.pool}, window {self.index}"
