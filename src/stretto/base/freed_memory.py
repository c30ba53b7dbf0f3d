"""On the CPU, memory that a step frees stays with the process for the next step, as torch keeps it on a GPU.

By default, glibc returns large blocks to the kernel, and the next step gets them back page by page. How many depends on
where blocks happen to be in memory: of eight equal worlds, one had a rank with 15,600 page faults per step, others had
hundreds, and its steps took 10 to 16 % longer. On one device, which has more memory per step, all had them.
"""

import ctypes
import os
from collections.abc import Callable

import torch

# From glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# Blocks below the first of these sizes that glibc accepts are kept. Before 2.35, it accepts at most 32 MiB.
_SIZES = (2**30, 2**25)
_USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


def keep_freed_memory(device: torch.device) -> None:
    """Keep memory that this process frees, if it computes on the CPU and the user has not configured glibc's malloc."""
    if device.type != "cpu" or is_malloc_configured():
        return
    mallopt = _libc_function("mallopt")
    if mallopt is None:
        return
    for size in _SIZES:
        if mallopt(_MMAP_THRESHOLD, size):
            break
    mallopt(_TRIM_THRESHOLD, -1)  # -1: memory at the end of the heap stays, too


def release_freed_memory(device: torch.device) -> None:
    """Give memory that this process has freed, but keeps, back to the system or to the device."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()
        return
    malloc_trim = _libc_function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def is_malloc_configured() -> bool:
    """Return whether the environment has settings of malloc."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "glibc.malloc." in tunables or any(name in os.environ for name in _USER_SETTINGS)


def _libc_function(name: str) -> Callable[..., int] | None:
    """Return a function of the C library; None if it has no such function: only glibc has these."""
    return getattr(ctypes.CDLL(None), name, None)
