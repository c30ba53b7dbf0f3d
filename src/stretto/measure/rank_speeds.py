"""Measures how much the ranks of a node slow each other down.

    round 1   1 rank   2 ranks   4 ranks
    round 2   1 rank   2 ranks   4 ranks

If there are more ranks than cores, the fastest step of a rank is one that had a core for itself. So what counts is the
time of many steps, until the last rank is done. A machine's speed drifts, so times are compared within rounds.
"""

import os
from collections import defaultdict
from dataclasses import dataclass, field

from stretto.measure.profile_input import ProfileInput
from stretto.measure.timing import fastest_time, median_ratio, synchronized_time
from stretto.mesh.world import World
from stretto.plan.cluster import divisors
from stretto.plan.profile import RankSpeed

_MIN_ROUNDS, _MAX_ROUNDS = 5, 9  # after the minimum, stop as soon as the times are plausible
# A measurement has as many steps as one rank takes in about this many seconds, but at most `_MAX_STEPS`.
_SECONDS, _MAX_STEPS = 0.4, 40
# Several ranks together, or one with more threads, should do at least as much work per second as the base: see
# `_StepTimes.speed`. If they do less than this fraction of it, other work on the node probably disturbed the
# measurement.
_MIN_PLAUSIBLE_GAIN = 0.7
# GPUs count as independent if each keeps more than this fraction of its speed while all of them compute.
_MIN_INDEPENDENT_SPEED = 0.97


@dataclass(frozen=True)
class SpeedMeasurement:
    """The speeds of ranks that compute at the same time; empty for GPUs that don't slow each other down."""

    speeds: tuple[RankSpeed, ...] = ()
    is_disturbed: bool = False  # the figures are implausible, probably because of other work on the node


def measure_rank_speeds(profile_input: ProfileInput, world: World) -> SpeedMeasurement:
    """Measure how fast the first node's ranks are while n of them compute, for each divisor n of their number."""
    if world.local_size == 1 and not profile_input.is_cpu:
        return SpeedMeasurement()
    step = _SharedStep(profile_input, world)
    times = _StepTimes({num_ranks: profile_input.num_threads(num_ranks) for num_ranks in divisors(world.local_size)})
    for num_rounds in range(1, _MAX_ROUNDS + 1):
        for num_ranks, threads in times.threads.items():
            profile_input.set_threads(num_ranks)
            for num_busy in (1, num_ranks):
                seconds = times.seconds[num_busy, threads]
                if len(seconds) < num_rounds:  # one rank alone may have the same threads for several `num_ranks`
                    seconds.append(step.seconds(num_busy))
        if num_rounds >= _MIN_ROUNDS and times.is_plausible:
            break
    profile_input.set_threads(world.local_size)
    speeds = times.speeds
    if not profile_input.is_cpu and all(speed.contended > _MIN_INDEPENDENT_SPEED for speed in speeds):
        speeds = ()
    return SpeedMeasurement(speeds, not times.is_plausible)


def guess_rank_speeds(profile_input: ProfileInput, world: World) -> SpeedMeasurement:
    """Return the speeds of processes that share cores evenly, or of GPUs that share nothing, without measuring."""
    if not profile_input.is_cpu:
        return SpeedMeasurement()
    num_cores = os.cpu_count() or 1
    counts = divisors(world.local_size)
    return SpeedMeasurement(tuple(RankSpeed(ranks=n, contended=min(1.0, num_cores / n), solo=1.0) for n in counts))


class _SharedStep:
    """A training step on half the rows and half the time steps, which several ranks run at the same time."""

    def __init__(self, profile_input: ProfileInput, world: World) -> None:
        rows, steps = max(1, profile_input.window.num_rows // 2), max(1, profile_input.window.num_steps // 2)
        self.engine = profile_input.make_engine(min(2, steps) if profile_input.model.causal else 1)
        self.window = profile_input.crop(rows, steps)
        self.world = world
        seconds = self._on_rank_zero(fastest_time(self._run, self.engine.device))
        self.num_runs = round(min(max(_SECONDS / seconds, 1), _MAX_STEPS))

    def seconds(self, num_ranks: int) -> float:
        """Return, on every rank, how long each step takes while the first `num_ranks` ranks compute."""
        self.world.barrier()
        started = synchronized_time(self.engine.device)
        if self.world.rank < num_ranks:
            for _ in range(self.num_runs):
                self._run()
        self.world.barrier()  # until the device of the last rank is done
        return self._on_rank_zero(synchronized_time(self.engine.device) - started) / self.num_runs

    def _run(self) -> None:
        self.engine.step(self.window, None, key=1)

    def _on_rank_zero(self, seconds: float) -> float:
        """Return rank 0's value on every rank."""
        return self.world.all_reduce([seconds if self.world.is_rank_zero else 0.0])[0]


@dataclass(frozen=True)
class _StepTimes:
    """The seconds per step in each round."""

    threads: dict[int, int]  # threads per rank, by the number of ranks on the node
    seconds: defaultdict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """By the number of ranks that compute at the same time, and their threads."""

    def speed(self, num_busy: int, threads: int) -> float:
        """Return the speed of each rank. 1 is the base: one rank with as many threads as on a full node."""
        base = self.seconds[1, self.threads[max(self.threads)]]
        return median_ratio(base, self.seconds[num_busy, threads])

    @property
    def is_plausible(self) -> bool:
        return all(num_busy * self.speed(num_busy, threads) > _MIN_PLAUSIBLE_GAIN for num_busy, threads in self.seconds)

    @property
    def speeds(self) -> tuple[RankSpeed, ...]:
        return tuple(
            RankSpeed(ranks=num_ranks, contended=self.speed(num_ranks, threads), solo=self.speed(1, threads))
            for num_ranks, threads in self.threads.items()
        )
