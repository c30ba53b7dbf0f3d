"""How much ranks that share a machine slow each other down."""

import math
import os
from dataclasses import dataclass

from stretto.measure.profile_input import ProfileInput
from stretto.measure.timing import fastest_time
from stretto.mesh.world import World
from stretto.plan.cluster import divisors
from stretto.plan.profile import RankSpeed

_MIN_ROUNDS, _MAX_ROUNDS = 3, 8
# Several ranks do no less work per second than one, and more threads do no less than fewer. A measurement that says
# they do less than this fraction was disturbed by other work on the machine.
_PLAUSIBLE = 0.7
# Devices that slow each other down by less than this are independent.
_UNSHARED = 0.97


@dataclass(frozen=True)
class SpeedMeasurement:
    """The speeds of ranks that compute at the same time; empty if each has its own device."""

    speeds: tuple[RankSpeed, ...] = ()
    is_disturbed: bool = False  # other work on the machine kept the figures from being plausible


def measure_rank_speeds(profile_input: ProfileInput, world: World) -> SpeedMeasurement:
    """Measure how fast the ranks of this machine are when 1, 2, 4, ... of them compute at the same time."""
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
    if not profile_input.is_cpu and all(speed.contended > _UNSHARED for speed in speeds):
        speeds = ()
    return SpeedMeasurement(speeds, not times.is_plausible)


def guess_rank_speeds(profile_input: ProfileInput, world: World) -> SpeedMeasurement:
    """Assume that processes share cores evenly, and devices nothing."""
    if not profile_input.is_cpu:
        return SpeedMeasurement()
    cores = os.cpu_count() or 1
    counts = divisors(world.local_size)
    return SpeedMeasurement(tuple(RankSpeed(ranks=n, contended=min(1.0, cores / n), solo=1.0) for n in counts))


class _SharedStep:
    """A step of a quarter of the batch, half its rows and half its steps, that several ranks run at the same time."""

    def __init__(self, profile_input: ProfileInput, world: World) -> None:
        rows, steps = max(1, profile_input.window.num_rows // 2), max(1, profile_input.window.num_steps // 2)
        self.engine = profile_input.make_engine(min(2, steps) if profile_input.model.causal else 1)
        self.window = profile_input.crop(rows, steps)
        self.world = world

    def mean_seconds(self, num_ranks: int) -> float:
        """Run the step on the first `num_ranks` ranks, and return the mean of their seconds on every rank."""
        self.world.barrier()
        seconds = 0.0
        if self.world.rank < num_ranks:
            seconds = fastest_time(self._run, self.engine.device)
            # Once more, so that no rank computes alone while others still measure.
            self._run()
        return self.world.all_reduce([seconds])[0] / num_ranks

    def _run(self) -> None:
        self.engine.step(self.window, None, 1)


@dataclass(frozen=True)
class _StepTimes:
    """The fewest seconds that a step takes; other work on the machine only adds time."""

    threads: dict[int, int]  # per rank, by the number of ranks on the machine
    solo: dict[int, float]  # one rank computes, by its threads
    contended: dict[int, float]  # all ranks compute, by their number

    @classmethod
    def of(cls, profile_input: ProfileInput, local_size: int) -> "_StepTimes":
        threads = {num_ranks: profile_input.num_threads(num_ranks) for num_ranks in divisors(local_size)}
        return cls(threads, dict.fromkeys(threads.values(), math.inf), dict.fromkeys(threads, math.inf))

    @property
    def base(self) -> float:
        """One rank computes with the threads that it has when the machine is full: what blocks are measured with."""
        return self.solo[self.threads[max(self.threads)]]

    @property
    def is_plausible(self) -> bool:
        gains = [self.base / seconds for seconds in self.solo.values()]
        gains += [num_ranks * self.base / seconds for num_ranks, seconds in self.contended.items()]
        return min(gains) > _PLAUSIBLE

    @property
    def speeds(self) -> tuple[RankSpeed, ...]:
        return tuple(
            RankSpeed(
                ranks=num_ranks, contended=self.base / seconds, solo=self.base / self.solo[self.threads[num_ranks]]
            )
            for num_ranks, seconds in self.contended.items()
        )
