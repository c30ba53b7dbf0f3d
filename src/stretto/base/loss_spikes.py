"""LossSpikes: which losses count as normal, and the steps that were undone because a loss did not."""

from statistics import median
from typing import Annotated

from pydantic import Field

from stretto.base.strict_model import StrictModel

_Loss = Annotated[float, Field(allow_inf_nan=False)]
_Step = Annotated[int, Field(ge=0, lt=2**63)]
_MAX_REWINDS = 100  # the last ones are kept


class Rewind(StrictModel):
    """A spike: the weights of an earlier step are used again, and the windows since then are skipped."""

    step: _Step  # with the spike; its window is the last one that is skipped
    to: _Step  # the step whose weights are used again; the window after it is the first one that is skipped


class LossSpikes(StrictModel):
    """The last normal losses of a run, its rewinds, and the step of the copy that the next spike goes back to.

    A value: `add` and `rewind` return the next one. It is part of a checkpoint, and the same on every rank.
    """

    losses: tuple[_Loss, ...] = Field((), strict=False)  # the last ones that are normal
    rewinds: tuple[Rewind, ...] = Field((), strict=False)
    num_rewinds: int = Field(0, ge=0, lt=2**63)
    copy_step: _Step | None = None  # of the copy of weights and optimizer state; None if there is none
    copy_num_averaged: int = Field(0, ge=0, lt=2**63)  # how many steps are in the average of the weights in the copy

    def is_spike(self, loss: float, factor: float, num_losses: int) -> bool:
        """Return whether a loss is above `factor` times the median of the last `num_losses`, if it is positive."""
        if len(self.losses) < num_losses or self.copy_step is None:
            return False
        usual = median(self.losses)
        return usual > 0 and loss > factor * usual

    def add(self, loss: float, num_losses: int) -> "LossSpikes":
        """Return the value after a normal loss; the last `num_losses` are kept."""
        return self.model_copy(update={"losses": (*self.losses, loss)[-num_losses:]})

    def with_copy(self, step: int, num_averaged: int) -> "LossSpikes":
        """Return the value after a copy was made of the weights after `step`."""
        return self.model_copy(update={"copy_step": step, "copy_num_averaged": num_averaged})

    def rewind(self, step: int) -> "LossSpikes":
        """Return the value after a spike in `step`: the weights after it are those of the copy."""
        assert self.copy_step is not None
        rewinds = (*self.rewinds, Rewind(step=step, to=self.copy_step))[-_MAX_REWINDS:]
        # A further spike in the next step skips only that step's window.
        return self.model_copy(
            update={"rewinds": rewinds, "num_rewinds": self.num_rewinds + 1, "copy_step": step},
        )

    def rewound_to(self, step: int) -> int | None:
        """Return the step whose weights are used again after `step`, the last one, if it had a spike; else None."""
        return self.rewinds[-1].to if self.rewinds and self.rewinds[-1].step == step else None

    def without_copy(self) -> "LossSpikes":
        """Return the value with the rewinds only, for a run that no longer looks for spikes."""
        return LossSpikes(rewinds=self.rewinds, num_rewinds=self.num_rewinds)
