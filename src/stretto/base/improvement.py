"""Improvement: the lowest validation loss so far, and how many evaluations ago it was."""

import math

from pydantic import Field

from stretto.base.strict_model import StrictModel


class Improvement(StrictModel):
    """How a run's evaluations have gone; early stopping and the plateau schedule depend on it."""

    best_loss: float | None = Field(None, allow_inf_nan=False)  # None before the first one that is finite
    best_step: int = Field(0, ge=0, lt=2**63)  # after which the loss was that
    last_step: int = Field(0, ge=0, lt=2**63)  # of the last evaluation
    num_since: int = Field(0, ge=0, lt=2**63)  # evaluations since the best

    def add(self, step: int, loss: float) -> "Improvement":
        """Return the value after an evaluation at `step`."""
        if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            return Improvement(best_loss=loss, best_step=step, last_step=step)
        return self.model_copy(update={"last_step": step, "num_since": self.num_since + 1})
