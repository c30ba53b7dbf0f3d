"""Improvement: the best validation loss or metric so far, and how many evaluations ago it was."""

from pydantic import Field

from stretto.base.score import Score
from stretto.base.strict_model import StrictModel


class Improvement(StrictModel):
    """How a run's evaluations have gone; early stopping and the plateau schedule depend on it."""

    name: str = "loss"  # of the figure
    best: float | None = Field(None, allow_inf_nan=False)  # None before the first one that is finite
    best_step: int = Field(0, ge=0, lt=2**63)  # after which the figure was that
    last_step: int = Field(0, ge=0, lt=2**63)  # of the last evaluation
    num_since: int = Field(0, ge=0, lt=2**63)  # evaluations since the best

    def add(self, step: int, score: Score) -> "Improvement":
        """Return the value after an evaluation at `step`. Another figure than before starts anew."""
        if score.name != self.name:
            return Improvement(name=score.name).add(step, score)
        best = None if self.best is None else Score(self.best, score.name, score.mode)
        if score.is_finite and (best is None or score.badness < best.badness):
            return Improvement(name=self.name, best=score.value, best_step=step, last_step=step)
        return self.model_copy(update={"last_step": step, "num_since": self.num_since + 1})
