"""TF32, which CUDA can use for fp32: faster, but the inputs of products are rounded to 11 significant bits.

By default, torch allows TF32 in cuDNN's RNNs and convolutions, but not in other matrix products. We set all of them
with torch's private functions: in torch 2.10, the public `torch.backends.cudnn.rnn.fp32_precision` has no effect once
an RNN is on CUDA. The older `allow_tf32` flags must not be mixed with these: reading them can then raise an error.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_OPERATIONS = ("matmul", "conv", "rnn")


def set_tf32(is_allowed: bool) -> None:
    """Allow or disallow TF32 in this process, for all matrix products, convolutions and RNNs in fp32 on CUDA."""
    _set(dict.fromkeys(_OPERATIONS, "tf32" if is_allowed else "ieee"))


def fp32_precisions() -> dict[str, str]:
    """Return how torch computes each operation in fp32 on CUDA: `tf32`, or else `ieee` or `none`, which are exact."""
    return {operation: torch._C._get_fp32_precision_getter("cuda", operation) for operation in _OPERATIONS}


@contextmanager
def use_tf32(is_allowed: bool) -> Iterator[None]:
    """Allow or disallow TF32 in this process within the context, and then restore torch's settings."""
    before = fp32_precisions()
    set_tf32(is_allowed)
    try:
        yield
    finally:
        _set(before)


def _set(precisions: dict[str, str]) -> None:
    for operation, precision in precisions.items():
        torch._C._set_fp32_precision_setter("cuda", operation, precision)
