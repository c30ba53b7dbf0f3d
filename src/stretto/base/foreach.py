"""Arithmetic on many tensors in few kernel launches, with torch's private foreach functions.

`torch._foreach_mul_` is what `torch.nn.utils.clip_grad_norm_` and torch's optimizers use; there is no public name.
"""

import torch
from torch import Tensor


def multiply_all(tensors: list[Tensor], factor: float) -> None:
    """Multiply all tensors by a factor, in place."""
    torch._foreach_mul_(tensors, factor)
