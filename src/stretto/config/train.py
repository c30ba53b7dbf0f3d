"""The train section: how weights move."""

from typing import Literal, Self

from pydantic import Field, model_validator

from stretto.base.strict_model import StrictModel


class TrainConfig(StrictModel):
    """Optimizer, learning rate and length of a run."""

    steps: int | None = Field(None, ge=1)
    """How many optimizer steps; if not given, `epochs` decides."""
    epochs: int = Field(1, ge=1)
    """How many times the training data is read."""
    optimizer: Literal["adamw", "sgd", "asgd"] = "adamw"
    """The optimizer, torch's own."""
    lr: float = Field(1e-3, gt=0, allow_inf_nan=False)
    """The learning rate at its peak."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """What the learning rate does after the warm-up."""
    warmup: int = Field(0, ge=0)
    """Steps over which the learning rate rises to its peak."""
    final_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Where the cosine ends, as a part of `lr`."""
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Decay of the weights."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Momentum of sgd."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of adamw's first moment."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of adamw's second moment."""
    average_from: int = Field(1, ge=1)
    """First step whose weights asgd averages; evaluation and the saved weights are the averages."""
    clip: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Largest norm of the whole gradient; 0 lets it be."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What to do when a loss or gradient is not finite: stop, with the batch saved for study, or skip that step."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum={self.momentum} needs optimizer='sgd', not '{self.optimizer}'; leave it out")
        if self.average_from > 1 and self.optimizer != "asgd":
            raise ValueError(
                f"average_from={self.average_from} needs optimizer='asgd', not '{self.optimizer}'; leave it out"
            )
        if self.steps is not None and self.warmup > self.steps:
            raise ValueError(f"warmup={self.warmup} exceeds steps={self.steps}; shorten it")
        return self
