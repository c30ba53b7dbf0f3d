"""Flushes denormals, the floats closest to zero, to zero: a CPU computes with them about ten times more slowly."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def flush_denormals() -> Iterator[None]:
    """Flush denormals to zero in this thread within the context, on the CPU.

    Gradients that vanish over a long sequence become denormals, as do optimizer moments of rarely used weights.
    """
    # torch has a setter but no getter. Half of the smallest normal number is a denormal, or zero if flushing is on.
    was_flushing = sys.float_info.min / 2 == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was_flushing)
