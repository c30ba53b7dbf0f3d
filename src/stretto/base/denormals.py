"""Denormals: numbers so near zero that a CPU needs ten times as long for each; they are flushed to zero."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def flush_denormals() -> Iterator[None]:
    """Flush denormals to zero on this thread within the context, on the CPU.

    Gradients that vanish over a long sequence end in denormals, and so do the moments of rarely used weights.
    """
    # Torch has a setter but no getter: half of the smallest normal number is a denormal, or zero if flushing is on.
    smallest = sys.float_info.min
    was_set = smallest / 2 == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was_set)
