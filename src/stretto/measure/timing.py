"""Stopwatch: how long something takes on a device, on a machine that is never quite quiet."""

import time
from collections.abc import Callable

import torch

# What is measured is tried for so many seconds, and so many times, at least and at most.
_SECONDS = 0.4
_MIN_RUNS, _MAX_RUNS = 2, 25


def synchronized_time(device: torch.device) -> float:
    """Return the time when all that a device was told is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def fastest_times(run: Callable[[], tuple[float, ...]], seconds: float = _SECONDS) -> tuple[float, ...]:
    """Call what returns some seconds, warm, until enough is known; return the least of each.

    Other work on the machine only ever adds time, and the least is what it can add least to.
    """
    run()
    found: list[tuple[float, ...]] = []
    started = time.perf_counter()
    while len(found) < _MIN_RUNS or (time.perf_counter() - started < seconds and len(found) < _MAX_RUNS):
        found.append(run())
    return tuple(map(min, zip(*found, strict=True)))
