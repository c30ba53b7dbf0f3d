"""AverageTrigger: decides from evaluations when the average of the weights begins (NT-ASGD)."""

from typing import Annotated

from pydantic import Field

from stretto.base.score import Score
from stretto.base.strict_model import StrictModel

_Badness = Annotated[float, Field(allow_inf_nan=False)]


class AverageTrigger(StrictModel):
    """Averaging begins after an evaluation that is worse than the best of those before the last few."""

    best_before: float | None = Field(None, allow_inf_nan=False)  # of the evaluations before `recent`
    recent: tuple[_Badness, ...] = Field((), strict=False)  # of the last evaluations; lower is better
    start: int | None = Field(None, ge=1, lt=2**63)  # the first step that is averaged

    def add(self, step: int, score: Score, patience: int) -> "AverageTrigger":
        """Return the trigger after an evaluation at `step`; the last `patience` evaluations are not compared with."""
        if self.start is not None or not score.is_finite:
            return self
        if self.best_before is not None and score.badness > self.best_before:
            return AverageTrigger(start=step + 1)
        best, recent = self.best_before, (*self.recent, score.badness)
        if len(recent) > patience:
            best, recent = recent[0] if best is None else min(best, recent[0]), recent[1:]
        return AverageTrigger(best_before=best, recent=recent)
