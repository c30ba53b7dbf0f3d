"""Ranks: how long each of them computes and waits, and how much memory it takes."""

from dataclasses import dataclass

from stretto.engine.engine import Engine
from stretto.mesh.device import peak_memory
from stretto.train.trainer import StepReport


@dataclass(frozen=True)
class RankReport:
    """How the work was shared in the steps since the last such report; a value for each rank."""

    step: int
    seconds: float  # mean of a step
    busy: tuple[float, ...]  # mean seconds of a step in which the rank read, computed or moved weights
    waiting: tuple[float, ...]  # mean seconds of a step in which it waited for others
    memory: tuple[int, ...]  # most bytes in use so far: of the device, or of the process on a CPU

    @property
    def bubble(self) -> float:
        """The part of all ranks' time that is spent waiting."""
        return 1 - sum(self.busy) / len(self.busy) / self.seconds


class RankMonitor:
    """Takes in this rank's steps, and now and then brings together what all ranks have to say of theirs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._step = self._num_steps = 0
        self._seconds = self._waiting = 0.0

    def add(self, report: StepReport) -> None:
        """Take in a step of this rank."""
        self._step = report.step
        self._num_steps += 1
        self._seconds += report.seconds
        self._waiting += report.waiting_seconds

    def gather(self) -> RankReport | None:
        """Return what all ranks say of the steps since this was asked last, on the first rank.

        All ranks call it after the same step; at least one step must lie between.
        """
        means = [self._seconds / self._num_steps, self._waiting / self._num_steps]
        self._num_steps, self._seconds, self._waiting = 0, 0.0, 0.0
        world = self._engine.mesh.world
        found = world.gather([*means, float(peak_memory(world.device))])
        if found is None:
            return None
        return RankReport(
            step=self._step,
            seconds=sum(rank[0] for rank in found) / len(found),
            busy=tuple(rank[0] - rank[1] for rank in found),
            waiting=tuple(rank[1] for rank in found),
            memory=tuple(int(rank[2]) for rank in found),
        )
