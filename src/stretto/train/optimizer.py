"""Makes the optimizer, and scales and clips gradients."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from stretto.base.errors import ConfigError
from stretto.base.foreach import multiply_all
from stretto.base.optimizer import OptimizerFactory
from stretto.config.train import TrainConfig
from stretto.mesh.world import World
from stretto.train.named_optimizer import check_group_sizes, optimizer_factory, parameter_groups, refuse_optimizer

# Fields of TrainConfig that have no effect if the caller passes an optimizer factory.
_OPTIMIZER_FIELDS = ("optimizer", "options", "groups", "lr", "weight_decay")


def make_optimizer(factory: OptimizerFactory, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that a user's factory makes for a rank's parameters.

    A stage without weights gets an optimizer with one empty parameter, so that every rank knows the learning rate.
    """
    optimizer = factory(list(parameters) or [_empty_parameter()])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"the optimizer function returned an object of type {type(optimizer).__name__}; pass one that takes "
            "parameters and returns a torch.optim.Optimizer, such as torch.optim.AdamW"
        )
    refuse_optimizer(type(optimizer), f"optimizer={type(optimizer).__name__}")
    return _set_peak_rates(optimizer)


def make_named_optimizer(
    config: TrainConfig, named_parameters: Iterable[tuple[str, nn.Parameter]], world: World
) -> torch.optim.Optimizer:
    """Return the optimizer that a config names, for a rank's parameters; raise if a pattern matches none on any rank.

    All ranks must call this. The first parameter group has the parameters that no pattern matches, or none.
    """
    groups = parameter_groups(config, named_parameters)
    if config.groups:
        sizes = world.all_reduce([float(len(group["params"])) for group in groups[1:]])
        check_group_sizes(config, sizes)
    if not any(group["params"] for group in groups):
        groups[0]["params"].append(_empty_parameter())
    return _set_peak_rates(optimizer_factory(config)(groups))


def _empty_parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(0))


def _set_peak_rates(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Set each group's `initial_lr`, its peak learning rate, to its learning rate."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return optimizer


def reject_unused_fields(config: TrainConfig) -> None:
    """Raise if a config sets a field that the caller's own optimizer factory overrides."""
    for name in _OPTIMIZER_FIELDS:
        value = getattr(config, name)
        if value != TrainConfig.model_fields[name].default:
            raise ConfigError(f"train.{name}={value} has no effect with your own optimizer; leave it out")


def scale_gradients(parameters: Iterable[nn.Parameter], count: float, norm: float, clip: float) -> float:
    """Divide gradients by `count`, the number of targets that the loss is summed over, and clip them, in one pass.

    `norm` is their norm over all ranks before the division. Return the norm after the division, but before clipping.
    """
    mean_norm = norm / count
    scale = 1 / count
    if clip and mean_norm > clip:
        scale *= clip / mean_norm
    gradients: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None and parameter.requires_grad:
            # The loss does not depend on this weight. Replicas all-reduce zeros for it; a single rank must match them.
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad is not None:
            gradients.append(parameter.grad)
    if gradients:
        multiply_all(gradients, scale)
    return mean_norm
