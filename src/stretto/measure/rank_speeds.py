"""Measures how much the ranks of a node slow each other down."""

import math
import os
from dataclasses import dataclass

from stretto.measure.profile_input import ProfileInput
from stretto.measure.timing import fastest_time
from stretto.mesh.world import World
from stretto.plan.cluster import divisors
from stretto.plan.profile import RankSpeed

_MIN_ROUNDS, _MAX_ROUNDS = 3, 8  # after the minimum, stop as soon as the times are plausible
# Several ranks together, or one with more threads, should do at least as much work per second as the base: see
# `base_seconds`. If they do less than this fraction of it, other work on the node probably disturbed the measurement.
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
    times = _StepTimes.of(profile_input, world.local_size)
    for num_rounds in range(1, _MAX_ROUNDS + 1):
        for num_ranks, threads in times.threads.items():
            profile_input.set_threads(num_ranks)
            times.solo[threads] = min(times.solo[threads], step.mean_seconds(1))
            times.contended[num_ranks] = min(times.contended[num_ranks], step.mean_seconds(num_ranks))
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

    def mean_seconds(self, num_ranks: int) -> float:
        """Time the step on the first `num_ranks` ranks; return, on every rank, the mean of their times in seconds."""
        self.world.barrier()
        seconds = 0.0
        if self.world.rank < num_ranks:
            seconds = fastest_time(self._run, self.engine.device)
            # Once more, so that this rank keeps its cores busy while others still measure.
            self._run()
        return self.world.all_reduce([seconds])[0] / num_ranks

    def _run(self) -> None:
        self.engine.step(self.window, None, key=1)


@dataclass(frozen=True)
class _StepTimes:
    """How long the fastest steps took, in seconds: other work on the node only adds time."""

    threads: dict[int, int]  # threads per rank, by the number of ranks on the node
    solo: dict[int, float]  # seconds while one rank computes, by its number of threads
    contended: dict[int, float]  # seconds while n ranks compute, by n

    @classmethod
    def of(cls, profile_input: ProfileInput, local_size: int) -> "_StepTimes":
        threads = {num_ranks: profile_input.num_threads(num_ranks) for num_ranks in divisors(local_size)}
        return cls(threads, dict.fromkeys(threads.values(), math.inf), dict.fromkeys(threads, math.inf))

    @property
    def base_seconds(self) -> float:
        """Seconds per step of one rank with as many threads as on a full node, which is how blocks are measured too."""
        return self.solo[self.threads[max(self.threads)]]

    @property
    def is_plausible(self) -> bool:
        gains = [self.base_seconds / seconds for seconds in self.solo.values()]
        gains += [num_ranks * self.base_seconds / seconds for num_ranks, seconds in self.contended.items()]
        return min(gains) > _MIN_PLAUSIBLE_GAIN

    @property
    def speeds(self) -> tuple[RankSpeed, ...]:
        return tuple(
            RankSpeed(
                ranks=num_ranks,
                contended=self.base_seconds / seconds,
                solo=self.base_seconds / self.solo[self.threads[num_ranks]],
            )
            for num_ranks, seconds in self.contended.items()
        )
