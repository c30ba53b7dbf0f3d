"""OptimizerFactory: the type with which callers choose an optimizer."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""Takes a rank's parameters and returns their optimizer: `torch.optim.AdamW`, `lambda params: SGD(params, lr=0.1)`."""
