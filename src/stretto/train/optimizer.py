"""Optimizer and learning rate: torch's optimizers, a schedule that is a pure function of the step."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stretto.config.train import TrainConfig


def make_optimizer(config: TrainConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
    """Return the optimizer that `config` names; none for a stage without weights."""
    listed = list(parameters)
    if not listed:
        return None
    decay = config.weight_decay
    if config.optimizer == "sgd":
        return torch.optim.SGD(listed, config.lr, momentum=config.momentum, weight_decay=decay, fused=True)
    if config.optimizer == "asgd":
        # lambd would decay weights and rate on its own; and torch's average starts two steps after t0.
        return torch.optim.ASGD(listed, config.lr, lambd=0.0, t0=config.average_from - 2, weight_decay=decay)
    return torch.optim.AdamW(listed, config.lr, (config.beta1, config.beta2), weight_decay=decay, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Let the next step use this rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
        if isinstance(optimizer, torch.optim.ASGD):
            # ASGD works out its rate at the end of a step for the next one, from a rate that is then the last one's.
            for parameter in group["params"]:
                if parameter in optimizer.state:
                    optimizer.state[parameter]["eta"].fill_(rate)


@contextmanager
def averaged_weights(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Put the averages that ASGD keeps in the place of the weights, for as long as the context lasts."""
    if not isinstance(optimizer, torch.optim.ASGD):
        yield
        return
    pairs = [(weight, state["ax"]) for weight, state in optimizer.state.items()]
    _swap(pairs)
    try:
        yield
    finally:
        _swap(pairs)


@torch.no_grad()
def _swap(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for weight, average in pairs:
        kept = weight.clone()
        weight.copy_(average)
        average.copy_(kept)


def learning_rate(config: TrainConfig, step: int, progress: float) -> float:
    """Return the learning rate of `step` (from 0), before which a part `progress` of the run is done.

    A cosine over the whole run or a constant, and a linear warm-up that holds it down at the start.
    """
    rate = config.lr
    if config.schedule == "cosine":
        cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
        rate *= config.final_lr_ratio + (1 - config.final_lr_ratio) * cosine
    return rate * min(1.0, (step + 1) / config.warmup) if config.warmup else rate


def scale_gradients(parameters: Iterable[nn.Parameter], count: float, norm: float, clip: float) -> float:
    """Turn gradients of the summed loss (of that norm) into clipped gradients of the mean; return the mean's norm.

    One pass over the gradients does both.
    """
    mean_norm = norm / count
    scale = 1 / count
    if clip and mean_norm > clip:
        scale *= clip / mean_norm
    gradients: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None and parameter.requires_grad:
            # A weight that nothing depends on. Replicas add up zeros for it, so one device has zeros too.
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad is not None:
            gradients.append(parameter.grad)
    if gradients:
        torch._foreach_mul_(gradients, scale)
    return mean_norm
