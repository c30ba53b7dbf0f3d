"""RankMonitor: measures how long each rank computes and waits, and how much memory it uses."""

from dataclasses import dataclass
from statistics import fmean

from stretto.engine.engine import Engine
from stretto.mesh.device import peak_memory
from stretto.train.trainer import StepReport


@dataclass(frozen=True)
class RankReport:
    """Each rank's time over the steps since the last report, and its memory."""

    step: int
    seconds: float  # per step, mean over steps and ranks
    busy: tuple[float, ...]  # per rank: mean seconds per step spent on data, compute and the optimizer, not waiting
    waiting: tuple[float, ...]  # per rank: mean seconds per step spent waiting for other ranks
    memory: tuple[int, ...]  # per rank: peak bytes so far, allocated on an accelerator or resident on the CPU

    @property
    def bubble(self) -> float:
        """The fraction of their time that ranks wait for other ranks, stages or replicas."""
        return 1 - fmean(self.busy) / self.seconds


class RankMonitor:
    """Collects the times of this rank's steps, and gathers those of all ranks on request."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last_step_report: StepReport | None = None
        self._num_steps, self._seconds, self._waiting_seconds = 0, 0.0, 0.0  # since the last call to gather

    def add(self, report: StepReport) -> None:
        """Add the report of a step of this rank."""
        self._last_step_report = report
        self._num_steps += 1
        self._seconds += report.seconds
        self._waiting_seconds += report.waiting_seconds

    def gather(self) -> RankReport | None:
        """On the first rank, return a report on the steps since the last call; elsewhere, None.

        All ranks must call it after the same step, and at least one step after the last call.
        """
        assert self._last_step_report is not None, "gather needs a step"
        means = [self._seconds / self._num_steps, self._waiting_seconds / self._num_steps]
        self._num_steps, self._seconds, self._waiting_seconds = 0, 0.0, 0.0
        world = self._engine.mesh.world
        gathered = world.gather([*means, float(peak_memory(world.device))])
        if gathered is None:
            return None
        seconds, waiting, memory = zip(*gathered, strict=True)
        busy = tuple(total - waited for total, waited in zip(seconds, waiting, strict=True))
        return RankReport(self._last_step_report.step, fmean(seconds), busy, waiting, tuple(map(int, memory)))
