"""Optimizer and learning rate: torch's optimizers, a schedule that is a pure function of the step."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from stretto.config.train import TrainConfig


def make_optimizer(config: TrainConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that `config` names."""
    if config.optimizer == "sgd":
        return torch.optim.SGD(
            parameters, config.lr, momentum=config.momentum, weight_decay=config.weight_decay, fused=True
        )
    if config.optimizer == "asgd":
        return torch.optim.ASGD(parameters, config.lr, weight_decay=config.weight_decay)
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(parameters, config.lr, betas, weight_decay=config.weight_decay, fused=True)


def learning_rate(config: TrainConfig, step: int, num_steps: int) -> float:
    """Return the learning rate of `step` (from 0): a linear warm-up, then a cosine or nothing."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.lr
    progress = (step - config.warmup) / max(1, num_steps - config.warmup)
    cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
    return config.lr * (config.final_lr + (1 - config.final_lr) * cosine)


def scale_gradients(parameters: Iterable[nn.Parameter], count: float, norm: float, clip: float) -> float:
    """Turn gradients of the summed loss (of that norm) into clipped gradients of the mean; return the mean's norm.

    One pass over the gradients does both.
    """
    mean_norm = norm / count
    scale = 1 / count
    if clip and mean_norm > clip:
        scale *= clip / mean_norm
    gradients: list[Tensor] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(gradients, scale)
    return mean_norm
