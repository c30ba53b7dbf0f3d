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
    schedule: Literal["cosine", "linear", "inverse_sqrt", "one_cycle", "plateau", "constant"] = "cosine"
    """Learning rate over the run: `cosine` and `linear` lower it from `lr`; `inverse_sqrt` divides it by the square
    root of the step; `one_cycle` raises it over the first 30 % of the run, then lowers it; `plateau` lowers it when
    evaluations no longer improve; `constant` keeps `lr`."""
    warmup: int = Field(0, ge=0)
    """Number of warm-up steps, over which a linear ramp up to 1 multiplies the scheduled learning rate; a shorter run
    ends within them."""
    final_lr_ratio: float | None = Field(None, ge=0, le=1)
    """The lowest learning rate, as a fraction of `lr`; by default 0.1 for `cosine` and `linear`, else 0."""
    plateau_patience: int = Field(2, ge=1)
    """plateau: number of evaluations without a lower validation loss (or a better `metrics.monitor`) before the
    learning rate is lowered."""
    plateau_factor: float = Field(0.5, gt=0, lt=1)
    """plateau: what the learning rate is multiplied by to lower it."""
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    """The optimizer's `weight_decay`."""
    clip: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Gradients are clipped to this global norm; 0 turns clipping off."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """If a loss or gradient is not finite, stop the run and save the batch, or skip the step (at most 99 in a row)."""
    spike: float | None = Field(None, gt=1, allow_inf_nan=False)
    """If a loss is above this many times the median of the last `spike_losses` losses, go back to a copy of the weights
    and optimizer state, and skip the windows since. The copy takes as much memory, and space in checkpoints, as both.
    By default never."""
    spike_losses: int = Field(32, ge=3)
    """spike: number of losses before a step that its loss is compared with; earlier losses are never a spike."""
    spike_rewind: int = Field(10, ge=1)
    """spike: steps between copies. A spike undoes the steps since the last copy: at most this many, and its own."""

    average: Literal["none", "ema", "swa", "nt-asgd"] = "none"
    """Average the weights after each step: `ema` exponentially, `swa` equally, `nt-asgd` equally from the evaluation on
    that is worse than those before the last `average_patience` (with `optimizer = "sgd"`, this is NT-ASGD). Evaluations
    and the final weights use the averages."""
    average_decay: float = Field(0.999, ge=0, lt=1)
    """ema: how much of the average each step keeps; the rest is from the weights."""
    average_start: int = Field(1, ge=1)
    """ema, swa: first step whose weights are averaged."""
    average_patience: int = Field(5, ge=1)
    """nt-asgd: number of recent evaluations that an evaluation is not compared with: averaging begins after one that is
    worse than the best before them."""
    patience: int | None = Field(None, ge=1)
    """Stop early after this many evaluations without a lower validation loss (or a better `metrics.monitor`); by
    default never."""

    @property
    def uses_evaluations(self) -> bool:
        """Whether training depends on the results of evaluations."""
        return self.patience is not None or self.schedule == "plateau" or self.average == "nt-asgd"

    @property
    def lowest_lr_ratio(self) -> float:
        """The lowest learning rate, as a fraction of `lr`."""
        if self.final_lr_ratio is not None:
            return self.final_lr_ratio
        return 0.1 if self.schedule in ("cosine", "linear") else 0.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, needed_field, needed_values in (
            ("plateau_patience", "schedule", ("plateau",)),
            ("plateau_factor", "schedule", ("plateau",)),
            ("average_decay", "average", ("ema",)),
            ("average_start", "average", ("ema", "swa")),
            ("average_patience", "average", ("nt-asgd",)),
        ):
            value, other = getattr(self, name), getattr(self, needed_field)
            if value != type(self).model_fields[name].default and other not in needed_values:
                needed = " or ".join(f"'{needed}'" for needed in needed_values)
                raise ValueError(f"{name}={value} needs {needed_field}={needed}, not '{other}'; remove {name}")
        for name in ("spike_losses", "spike_rewind"):
            value = getattr(self, name)
            if self.spike is None and value != type(self).model_fields[name].default:
                raise ValueError(f"{name}={value} has no effect without spike; set spike, or remove {name}")
        if self.steps is not None and self.average_start > self.steps:
            raise ValueError(f"average_start={self.average_start} exceeds steps={self.steps}; start earlier")
        if self.warmup and self.schedule == "one_cycle":
            raise ValueError(f"warmup={self.warmup} has no effect: one_cycle has a rise of its own; remove warmup")
        return self
