"""OptimizerFactory: how callers say which optimizer they want."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""From a rank's parameters to their optimizer: `torch.optim.AdamW`, `lambda parameters: SGD(parameters, lr=0.1)`."""
