"""The optimizers of torch.optim by name, as a config describes them: a class, its options, and parameter groups."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn

from stretto.base.errors import ConfigError
from stretto.base.reason import short_reason
from stretto.config.train import ParameterGroup, TrainConfig

# What a config has fields for, and what can't work: gradients of the update itself.
_RESERVED_OPTIONS = {"self", "params", "lr", "weight_decay", "differentiable"}
# Their fused kernels support every device and dtype that stretto does; that of Adagrad does not.
_FUSED_CLASSES = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_REFUSED: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "computes the loss several times per step, and needs all parameters on one rank; use adamw",
    torch.optim.ASGD: "has a schedule and an average of its own; use sgd with train.average='swa'",
    torch.optim.SparseAdam: "needs sparse gradients, but all gradients are dense here; use adam",
}
# Refused by name only: a factory can give it the matrices of a model.
_MUON = "updates matrices only, but a model has biases too; use adamw"

OptimizerConstructor = Callable[..., torch.optim.Optimizer]


def optimizer_factory(config: TrainConfig) -> OptimizerConstructor:
    """Return a constructor of the optimizer that a config names; raise if its options don't fit.

    It takes parameters, or the groups of `parameter_groups`.
    """
    optimizer_class = _find_class(config.optimizer)
    settings = _settings(optimizer_class, "train", config)
    if optimizer_class in _FUSED_CLASSES and not settings.get("foreach"):
        settings = {"fused": True, **settings}
    _try_settings(optimizer_class, "train", settings)
    for index, group in enumerate(config.groups):
        name = f"train.groups[{index}]"
        _try_settings(optimizer_class, name, {**settings, **_settings(optimizer_class, name, group)})
    return partial(optimizer_class, **settings)


def parameter_groups(config: TrainConfig, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Split parameters into the config's groups, in its order; those that match no pattern are before them."""
    others: list[nn.Parameter] = []
    members: list[list[nn.Parameter]] = [[] for _ in config.groups]
    for name, parameter in named_parameters:
        matches = (fnmatchcase(name, group.match) for group in config.groups)
        next((params for params, is_match in zip(members, matches, strict=True) if is_match), others).append(parameter)
    optimizer_class = _find_class(config.optimizer)
    return [
        {"params": others},
        *(
            {"params": params, **_settings(optimizer_class, f"train.groups[{index}]", group)}
            for index, (group, params) in enumerate(zip(config.groups, members, strict=True))
        ),
    ]


def check_optimizer(config: TrainConfig, model: nn.Module) -> None:
    """Raise if the optimizer that a config names, its options or its groups don't fit the whole model."""
    optimizer_factory(config)
    groups = parameter_groups(config, model.named_parameters())
    check_group_sizes(config, [len(group["params"]) for group in groups[1:]])


def check_group_sizes(config: TrainConfig, sizes: Sequence[float]) -> None:
    """Raise if one of the config's groups has no parameter in the whole model; `sizes` are their numbers."""
    for group, size in zip(config.groups, sizes, strict=True):
        if not size:
            raise ConfigError(
                f"train.groups: match={group.match!r} matches no parameter, or only those of earlier groups; use a "
                "pattern such as '*.bias*' or 'blocks.0.*'"
            )


def refuse_optimizer(optimizer_class: type[torch.optim.Optimizer], setting: str) -> None:
    """Raise if an optimizer does not update each parameter by itself, from a dense gradient and the given rate.

    `setting` is what the user has set, for the message.
    """
    for refused, reason in _REFUSED.items():
        if issubclass(optimizer_class, refused):
            raise ConfigError(f"{setting} can't be used: it {reason}")


def refuse_to_split_rows(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """Raise if an optimizer's update of a row depends on other rows of the weight, which other stages may hold."""
    if issubclass(optimizer_class, (torch.optim.Adafactor, torch.optim.Muon)):
        raise ConfigError(
            f"optimizer={optimizer_class.__name__} updates a row of a weight depending on its other rows, which "
            "layout.vocab_parallel=true splits over the stages; use adamw, or leave out vocab_parallel"
        )


def _find_class(name: str) -> type[torch.optim.Optimizer]:
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if name not in classes:
        usable = sorted(key for key, value in classes.items() if value not in _REFUSED and key != "muon")
        raise ConfigError(f"train.optimizer={name!r} is not a class of torch.optim; choose from {', '.join(usable)}")
    if name == "muon":
        raise ConfigError(f"train.optimizer={name!r} can't be used: it {_MUON}")
    refuse_optimizer(classes[name], f"train.optimizer={name!r}")
    return classes[name]


def _settings(
    optimizer_class: type[torch.optim.Optimizer], where: str, config: TrainConfig | ParameterGroup
) -> dict[str, Any]:
    """Return the arguments of the class that a config or a group sets; raise if it has no argument of that name."""
    arguments = inspect.signature(optimizer_class).parameters
    valid = sorted(set(arguments) - _RESERVED_OPTIONS)
    for name, value in config.options.items():
        if name not in valid:
            has_field = name in ("lr", "weight_decay")
            remedy = f"set {where}.{name} instead" if has_field else f"choose from {', '.join(valid)}"
            raise ConfigError(f"{where}.options: {name} is not an option of {optimizer_class.__name__}; {remedy}")
        default = arguments[name].default
        # The class looks at the first ones only, and fails in the first step if there are more.
        if isinstance(default, tuple) and isinstance(value, list) and len(value) != len(default):
            raise ConfigError(
                f"{where}.options: {name}={value} has {len(value)} values, but {optimizer_class.__name__} takes "
                f"{len(default)}; use values such as {list(default)}"
            )
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in config.options.items()}
    if config.lr is not None:
        settings["lr"] = config.lr
    if config.weight_decay is not None and "weight_decay" in arguments:
        settings["weight_decay"] = config.weight_decay
    elif config.weight_decay:
        name = optimizer_class.__name__
        raise ConfigError(f"{where}.weight_decay={config.weight_decay} has no effect: {name} has none; leave it out")
    return settings


def _try_settings(optimizer_class: type[torch.optim.Optimizer], where: str, settings: Mapping[str, Any]) -> None:
    """Raise if the class rejects a setting."""
    try:
        optimizer_class([nn.Parameter(torch.zeros(1))], **settings)
    except Exception as error:  # noqa: BLE001 - such as the IndexError of betas = [0.9]
        reason = short_reason(error)
        raise ConfigError(f"{where}.options don't fit {optimizer_class.__name__} ({reason}); correct them") from None
