"""Improvement: the best validation loss or metric so far, and how many evaluations ago it was."""

from pydantic import Field

from stretto.base.score import Score, ScoreMode
from stretto.base.strict_model import StrictModel


class Improvement(StrictModel):
    """How a run's evaluations have gone; early stopping and the plateau schedule depend on it."""

    name: str = "loss"  # of the metric
    mode: ScoreMode = "min"
    best: float | None = Field(None, allow_inf_nan=False)  # None before the first one that is finite
    best_step: int = Field(0, ge=0, lt=2**63)  # after which the metric was that
    last_step: int = Field(0, ge=0, lt=2**63)  # of the last evaluation
    num_since: int = Field(0, ge=0, lt=2**63)  # evaluations since the best

    def of_metric(self, name: str, mode: ScoreMode) -> "Improvement":
        """Return this value; a different metric or mode restarts the comparison."""
        return self if (self.name, self.mode) == (name, mode) else Improvement(name=name, mode=mode)

    def add(self, step: int, score: Score) -> "Improvement":
        """Return the value after an evaluation at `step`. A different metric or mode restarts the comparison."""
        improvement = self.of_metric(score.name, score.mode)
        best = None if improvement.best is None else Score(improvement.best, score.name, score.mode)
        if score.is_finite and (best is None or score.badness < best.badness):
            return Improvement(name=score.name, mode=score.mode, best=score.value, best_step=step, last_step=step)
        return improvement.model_copy(update={"last_step": step, "num_since": improvement.num_since + 1})
