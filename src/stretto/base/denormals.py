"""Denormals: numbers so near zero that a CPU takes ten times as long for each; here they are zero."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def flush_denormals() -> Iterator[None]:
    """Compute with zero in place of denormals, for as long as the context lasts, on this thread's CPU.

    A gradient that fades over a long row ends in such numbers, and so do the moments of weights that are seldom used.
    """
    # Torch can set this but not tell it. Halved, the smallest normal number is denormal, or zero if it is set.
    smallest = sys.float_info.min
    was_set = smallest / 2 == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was_set)
