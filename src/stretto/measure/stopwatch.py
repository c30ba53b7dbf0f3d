"""Stopwatch: how long something takes on a device, on a machine that is never quite quiet."""

import time
from collections.abc import Callable

import torch

# What is measured is tried for so many seconds, and so many times, at least and at most.
_SECONDS = 0.4
_LEAST, _MOST = 2, 25


def lap(device: torch.device) -> float:
    """Return the time when all that a device was told is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def least_laps(run: Callable[[], tuple[float, ...]], seconds: float = _SECONDS) -> tuple[float, ...]:
    """Call what returns some seconds, warm, until enough is known; return the least of each.

    Other work on the machine only ever adds time, and the least is what it can add least to.
    """
    run()
    found: list[tuple[float, ...]] = []
    started = time.perf_counter()
    while len(found) < _LEAST or (time.perf_counter() - started < seconds and len(found) < _MOST):
        found.append(run())
    return tuple(map(min, zip(*found, strict=True)))
