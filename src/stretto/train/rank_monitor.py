"""RankMonitor: measures how long each rank computes and waits, and how much memory it uses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from torch import Tensor

from stretto.engine.engine import Engine
from stretto.mesh.device import peak_memory
from stretto.mesh.node import node_number
from stretto.train.node_report import NodeReport
from stretto.train.straggler import Straggler, StragglerCheck, StragglerReport
from stretto.train.trainer import StepReport

# The log has the figures of each rank up to so many ranks; with more, those of groups of ranks, at most so many.
_MAX_LOGGED = 64


@dataclass(frozen=True)
class RankReport:
    """Each rank's time over the steps since the last report, and its memory."""

    step: int
    seconds: float  # per step, mean over steps and ranks
    busy: tuple[float, ...]  # per rank: mean seconds per step spent on data, compute and the optimizer, not waiting
    waiting: tuple[float, ...]  # per rank: mean seconds per step spent waiting for other ranks
    memory: tuple[int, ...]  # per rank: peak bytes so far, allocated on an accelerator or resident on the CPU
    ranks_per_node: int = 1
    straggler: Straggler | None = None  # a rank that all others have been waiting for

    @property
    def bubble(self) -> float:
        """The fraction of their time that ranks wait for other ranks, stages or replicas."""
        return 1 - fmean(self.busy) / self.seconds

    def log_fields(self) -> Mapping[str, object]:
        """Return the fields of the report's log line: its size is limited, however many ranks there are.

        With more than 64 ranks, each list has a figure per node, or per group of nodes if there are more than 64: the
        mean of its ranks, and for the busy times also the least and the most.
        """
        straggler = {} if self.straggler is None else {"straggler": asdict(self.straggler)}
        num_ranks = len(self.busy)
        if num_ranks <= _MAX_LOGGED:
            lists = {"busy": self.busy, "waiting": self.waiting, "memory": self.memory}
            return {"step": self.step, "seconds": self.seconds, **lists, **straggler}
        num_nodes = -(-num_ranks // self.ranks_per_node)
        group_size = self.ranks_per_node * -(-num_nodes // _MAX_LOGGED)

        def summarize(values: Sequence[float], summary: Callable[[Sequence[float]], float]) -> list[float]:
            groups = [values[start : start + group_size] for start in range(0, num_ranks, group_size)]
            return [float(f"{summary(group):.4g}") for group in groups]

        slowest_rank = max(range(num_ranks), key=lambda rank: self.busy[rank])
        per_rank = {"busy": self.busy, "waiting": self.waiting, "memory": self.memory}
        return {
            "step": self.step,
            "seconds": self.seconds,
            "num_ranks": num_ranks,
            "over_ranks": {name: _min_mean_max(values) for name, values in per_rank.items()},
            "ranks_per_group": group_size,
            "busy": summarize(self.busy, fmean),
            "busy_min": summarize(self.busy, min),
            "busy_max": summarize(self.busy, max),
            "waiting": summarize(self.waiting, fmean),
            "memory": summarize(self.memory, max),
            "slowest_rank": slowest_rank,
            "slowest_busy": self.busy[slowest_rank],
            **straggler,
        }


def _min_mean_max(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "mean": fmean(values), "max": max(values)}


class RankMonitor:
    """Collects the times of this rank's steps, and gathers those of all ranks on request.

    A rank that costs all others at least `straggler_percent` of each step is named in the reports, and once in
    `new_straggler`.
    """

    def __init__(self, engine: Engine, *, straggler_percent: float = 10.0) -> None:
        self._engine = engine
        self._straggler_check = StragglerCheck(engine.mesh.topology, straggler_percent)
        self._known_stragglers: set[int] = set()  # the ranks that were reported
        self._last_step_report: StepReport | None = None
        self._first_step = 1  # since the last call to gather
        self._node_number = float(node_number())
        self._clear()

    def _clear(self) -> None:
        """Begin a new report."""
        self._num_steps, self._seconds, self._waiting_seconds, self._data_seconds = 0, 0.0, 0.0, 0.0

    def add(self, report: StepReport) -> None:
        """Add the report of a step of this rank."""
        self._last_step_report = report
        if self._num_steps == 0:
            self._first_step = report.step
        self._num_steps += 1
        self._seconds += report.seconds
        self._waiting_seconds += report.waiting_seconds
        self._data_seconds += report.data_seconds

    def gather(self) -> RankReport | None:
        """On the first rank, return a report on the steps since the last call; elsewhere, None.

        All ranks must call it after the same step, and at least one step after the last call.
        """
        return self.gather_by_node()[0]

    def gather_by_node(self) -> tuple[RankReport | None, NodeReport | None]:
        """Like `gather`; but on the first rank of each node, return also a report on the ranks of the node."""
        assert self._last_step_report is not None, "gather needs a step"
        totals = (self._seconds, self._waiting_seconds, self._data_seconds)
        means = [total / self._num_steps for total in totals]
        self._clear()
        world = self._engine.mesh.world
        # All ranks get the figures of all, so the first rank of a node needs no messages from the others.
        rows = world.gather_rows([self._node_number, *means, float(peak_memory(world.device))])
        step = self._last_step_report.step
        return self._report_all(step, rows) if world.is_rank_zero else None, _report_node(step, rows, world.rank)

    def new_straggler(self, report: RankReport) -> StragglerReport | None:
        """Return the straggler of a report of `gather`, the first time that this rank is one; else None."""
        straggler = report.straggler
        if straggler is None or straggler.rank in self._known_stragglers:
            return None
        self._known_stragglers.add(straggler.rank)
        percent = 100 * straggler.seconds / report.seconds
        return StragglerReport(report.step, percent=percent, **asdict(straggler))

    def _report_all(self, step: int, rows: Tensor) -> RankReport:
        nodes, seconds, waiting, _, memory = (tuple(column) for column in rows.T.tolist())
        busy = _subtract(seconds, waiting)
        mean_seconds = fmean(seconds)
        straggler = self._straggler_check.add(self._first_step, mean_seconds, busy, nodes)
        ranks_per_node = self._engine.mesh.world.local_size
        return RankReport(step, mean_seconds, busy, waiting, tuple(map(int, memory)), ranks_per_node, straggler)


def _report_node(step: int, rows: Tensor, rank: int) -> NodeReport | None:
    """Return the report on a rank's node; None if it is not the first rank there.

        node   seconds  waiting  data   memory
    0    11        2.0      0.5   0.1      1e9
    1    11        2.0      0.7   0.1      1e9     rank 0 reports on ranks 0 and 1, rank 2 on rank 2
    2    77        2.0      0.1   0.2      1e9
    """
    (ranks,) = (rows[:, 0] == rows[rank, 0]).nonzero(as_tuple=True)
    if ranks[0] != rank:
        return None
    _, seconds, waiting, data, memory = (tuple(column) for column in rows[ranks].T.tolist())
    busy = _subtract(seconds, waiting)
    return NodeReport(step, tuple(ranks.tolist()), seconds, busy, waiting, data, tuple(map(int, memory)))


def _subtract(totals: Sequence[float], parts: Sequence[float]) -> tuple[float, ...]:
    return tuple(total - part for total, part in zip(totals, parts, strict=True))
