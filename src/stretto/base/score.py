"""Score: a loss or metric of an evaluation, by which the steps of a run are compared."""

import math
from dataclasses import dataclass
from typing import Literal

ScoreMode = Literal["min", "max"]
"""Whether a lower or a higher value is better."""


@dataclass(frozen=True)
class Score:
    """A validation loss, or the value of a metric."""

    value: float
    name: str = "loss"
    mode: ScoreMode = "min"

    def __str__(self) -> str:
        return f"validation {self.name.replace('_', ' ')} {self.value:.4f}"

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.value)

    @property
    def badness(self) -> float:
        """A number that is lower if the score is better."""
        return self.value if self.mode == "min" else -self.value
