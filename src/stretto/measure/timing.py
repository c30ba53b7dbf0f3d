"""Times an operation on a device, on a machine where other work may run."""

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

# By default, an operation is repeated for _REPEAT_SECONDS; always at least _MIN_RUNS and at most _MAX_RUNS times.
_REPEAT_SECONDS = 0.4
_MIN_RUNS, _MAX_RUNS = 2, 25


def synchronized_time(device: torch.device) -> float:
    """Wait for all work queued on a device, then return the current time in seconds."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def median_ratio(seconds: Sequence[float], others: Sequence[float]) -> float:
    """Return the median, over the rounds, of the ratio of two times that were measured in the same round.

    A machine's speed drifts, but hardly within a round.
    """
    return statistics.median(first / second for first, second in zip(seconds, others, strict=True))


def median_bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return the bounds of the median, each with 95 % confidence: how many values are below it is a binomial.

    Of fewer than five values, these are the lowest and the highest, with less confidence.
    """
    ordered, place, tail = sorted(values), 0, 0.0
    while (tail := tail + math.comb(len(ordered), place) / 2 ** len(ordered)) <= 0.05:
        place += 1
    place = max(place - 1, 0)
    return ordered[place], ordered[-1 - place]


def fastest_times(run: Callable[[], tuple[float, ...]], seconds: float = _REPEAT_SECONDS) -> tuple[float, ...]:
    """Call `run`, which returns durations, for about `seconds` after a warm-up; return the minimum of each duration.

    Other work on the machine only ever adds time, so the minimum is closest to the true cost.
    """
    run()
    times: list[tuple[float, ...]] = []
    started = time.perf_counter()
    while len(times) < _MIN_RUNS or (time.perf_counter() - started < seconds and len(times) < _MAX_RUNS):
        times.append(run())
    return tuple(map(min, zip(*times, strict=True)))


def fastest_time(run: Callable[[], object], device: torch.device) -> float:
    """Return how long the fastest of several calls to `run` took on a device, in seconds."""

    def timed() -> tuple[float]:
        started = synchronized_time(device)
        run()
        return (synchronized_time(device) - started,)

    return fastest_times(timed)[0]
