"""OptimizerFactory: a function that makes the optimizer for a rank's parameters."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""Takes a rank's parameters and returns an optimizer: `torch.optim.AdamW`, or `lambda params: SGD(params, lr=0.1)`."""
