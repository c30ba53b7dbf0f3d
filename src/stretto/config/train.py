"""The [train] section: optimizer, learning rate, and length of a run."""

from typing import Literal, Self

from pydantic import Field, model_validator

from stretto.base.strict_model import StrictModel


class TrainConfig(StrictModel):
    """Optimizer, learning rate, and length of a run."""

    steps: int | None = Field(None, ge=1)
    """Number of optimizer steps; overrides `epochs`."""
    epochs: int = Field(1, ge=1)
    """Number of passes over the training data."""
    optimizer: Literal["adamw", "sgd", "asgd"] = "adamw"
    """The optimizer: AdamW, SGD or ASGD of torch.optim."""
    lr: float = Field(1e-3, gt=0, allow_inf_nan=False)
    """The peak learning rate."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning rate over the run: `cosine` lowers it from `lr` to `final_lr_ratio` x `lr`, `constant` keeps `lr`."""
    warmup: int = Field(0, ge=0)
    """Number of warm-up steps, over which a linear ramp up to 1 multiplies the scheduled learning rate."""
    final_lr_ratio: float = Field(0.1, ge=0, le=1)
    """The learning rate at the end of the cosine, as a fraction of `lr`."""
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    """The optimizer's `weight_decay`."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """The momentum of SGD; other optimizers have none."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay rate of AdamW's first moment."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Decay rate of AdamW's second moment."""
    average_from: int = Field(1, ge=1)
    """First step whose weights ASGD averages; evaluations and the final weights use the averages."""
    clip: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Gradients are clipped to this global norm; 0 turns clipping off."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """If a loss or gradient is not finite, stop the run and save the batch, or skip the step (at most 99 in a row)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum={self.momentum} needs optimizer='sgd', not '{self.optimizer}'; remove momentum")
        if self.average_from > 1 and self.optimizer != "asgd":
            raise ValueError(
                f"average_from={self.average_from} needs optimizer='asgd', not '{self.optimizer}'; remove average_from"
            )
        if self.steps is not None and self.warmup > self.steps:
            raise ValueError(f"warmup={self.warmup} exceeds steps={self.steps}; shorten the warmup")
        return self
