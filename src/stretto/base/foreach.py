"""Arithmetic on many tensors in few kernel launches, with torch's private foreach functions.

`torch._foreach_mul_` is what `torch.nn.utils.clip_grad_norm_` and torch's optimizers use; there is no public name.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def multiply_all(tensors: list[Tensor], factor: float) -> None:
    """Multiply all tensors by a factor, in place."""
    torch._foreach_mul_(tensors, factor)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, converted to the target's dtype."""
    torch._foreach_copy_(targets, sources)  # type: ignore[arg-type]


def interpolate_all(targets: Sequence[Tensor], sources: Sequence[Tensor], weight: float) -> None:
    """Move each target towards its source by a fraction of the way, in place."""
    torch._foreach_lerp_(targets, sources, weight)  # type: ignore[call-overload]


def add_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Add each source to its target, in place."""
    torch._foreach_add_(targets, sources)  # type: ignore[call-overload]
