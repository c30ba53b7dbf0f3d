"""On the CPU, memory that a step frees stays with the process for the next step, as torch keeps it on a GPU.

By default, glibc returns large blocks to the kernel, and the next step gets them back page by page. How many depends on
where blocks happen to be in memory: one of eight equal ranks had 15,600 page faults per step, the others had hundreds,
and its steps took 10 to 16 % longer.
"""

import ctypes
import os
from functools import cache

import torch

# From glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# Smaller blocks are kept. A glibc before 2.35 takes at most the second size.
_SIZES = (2**30, 2**25)
_USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@cache
def keep_freed_memory(device: torch.device) -> None:
    """Keep memory that this process frees, if it computes on the CPU and the user has not configured glibc's malloc."""
    mallopt = _libc_function("mallopt")
    if device.type != "cpu" or mallopt is None or any(name in os.environ for name in _USER_SETTINGS):
        return
    if any(mallopt(_MMAP_THRESHOLD, size) for size in _SIZES):
        mallopt(_TRIM_THRESHOLD, -1)  # never


def return_freed_memory(device: torch.device) -> None:
    """Return the memory that this process has freed, and keeps, to the system or the device."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()
        return
    malloc_trim = _libc_function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _libc_function(name: str) -> "ctypes._NamedFuncPointer | None":
    """Return a function of the C library, if it has it: only glibc has these."""
    return getattr(ctypes.CDLL(None), name, None)
