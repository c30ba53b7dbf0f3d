"""The [train] section: optimizer, learning rate, and length of a run."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from stretto.base.strict_model import StrictModel


def _check_options(options: object) -> object:
    """Return options with lists in place of tuples; raise if TOML could not hold a value."""
    if not isinstance(options, Mapping):
        return options  # pydantic rejects it
    checked = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
    for name, value in checked.items():
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, bool | int | float | str) for item in items):
            raise ValueError(f"{name}={value!r} should be a number, a string, true, false or a list of these")
    return checked


Options = Annotated[dict[str, Any], BeforeValidator(_check_options)]


class ParameterGroup(StrictModel):
    """Parameters, chosen by name, with settings of their own."""

    match: str
    """Pattern of the parameters' names, as `stretto show` prints them: `*.bias*` or `blocks.0.*`."""
    lr: float | None = Field(None, gt=0, allow_inf_nan=False)
    """The peak learning rate; by default that of `train`."""
    weight_decay: float | None = Field(None, ge=0, allow_inf_nan=False)
    """The weight decay; by default that of `train`."""
    options: Options = Field({})
    """Other arguments of the optimizer's class; by default those of `train`."""


class TrainConfig(StrictModel):
    """Optimizer, learning rate, and length of a run."""

    steps: int | None = Field(None, ge=1)
    """Number of optimizer steps; overrides `epochs`."""
    epochs: int = Field(1, ge=1)
    """Number of passes over the training data."""
    optimizer: Annotated[str, BeforeValidator(lambda name: name.lower() if isinstance(name, str) else name)] = "adamw"
    """The optimizer: the name of a class of torch.optim, such as `adamw`, `radam` or `sgd`."""
    options: Options = Field({})
    """Other arguments of the optimizer's class, as a table: `{ betas = [0.9, 0.99], eps = 1e-6 }`."""
    groups: tuple[ParameterGroup, ...] = Field((), strict=False)
    """Tables `[[train.groups]]`, each for the parameters whose names match its pattern `match`, with `lr`,
    `weight_decay` or `options` of their own; the first match wins."""
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
    clip: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Gradients are clipped to this global norm; 0 turns clipping off."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """If a loss or gradient is not finite, stop the run and save the batch, or skip the step (at most 99 in a row)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.steps is not None and self.warmup > self.steps:
            raise ValueError(f"warmup={self.warmup} exceeds steps={self.steps}; shorten the warmup")
        return self
