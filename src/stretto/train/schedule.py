"""The learning rate of each step: its schedule, times a warm-up.

1 |  ._              1 |.                1 |  ._             1 |   .           1 |---.
  | /  '-.            | '-.               | /   '--..         | /  '.           |    '---.
  |/      '-._        |    '-.            |/         '''      |/     '-.._      |         '---
  +-----------        +---------          +-------------      +-----------      +-------------
     cosine              linear             inverse_sqrt        one_cycle          plateau
"""

import math

import torch

from stretto.config.train import TrainConfig

_ONE_CYCLE_RISE, _ONE_CYCLE_START = 0.3, 0.04  # the fraction of a run until the peak, and the rate that it starts from


def learning_rate_factor(config: TrainConfig, step: int, progress: float, num_reductions: int = 0) -> float:
    """Return the learning rate of `step` (from 0) as a fraction of its peak: the schedule, times a warm-up.

    `progress` is the fraction of the run that is done, `num_reductions` how often a plateau has lowered the rate.
    """
    lowest, progress = config.lowest_lr_ratio, min(1.0, progress)
    match config.schedule:
        case "cosine":
            factor = _along_cosine(1, lowest, progress)
        case "linear":
            factor = 1 + (lowest - 1) * progress
        case "inverse_sqrt":
            # From the end of the warm-up on; without one, from the first step on.
            factor = max(lowest, math.sqrt(max(1, config.warmup) / max(1, config.warmup, step + 1)))
        case "one_cycle" if progress < _ONE_CYCLE_RISE:
            factor = _along_cosine(_ONE_CYCLE_START, 1, progress / _ONE_CYCLE_RISE)
        case "one_cycle":
            factor = _along_cosine(1, lowest, (progress - _ONE_CYCLE_RISE) / (1 - _ONE_CYCLE_RISE))
        case "plateau":
            factor = max(lowest, config.plateau_factor**num_reductions)
        case "constant":
            factor = 1.0
    return factor * min(1.0, (step + 1) / config.warmup) if config.warmup else factor


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Set each group's learning rate for the next step: its peak times `factor`. Return the first group's rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
    return float(optimizer.param_groups[0]["lr"])


def _along_cosine(start: float, end: float, fraction: float) -> float:
    """Return the value at a fraction of the way from `start` to `end`, along half a period of a cosine."""
    return end + (start - end) * (1 + math.cos(math.pi * fraction)) / 2
