"""StragglerCheck: finds a rank that takes longer than the others with the same work, so that all wait for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from stretto.mesh.topology import Topology

# A rank is a straggler if it costs all others a certain part of each step in so many reports one after the other, and
# until it no longer does in as many: a report that is disturbed does not end it.
_MIN_REPORTS = 3
_MIN_PEERS = 3  # the median of two ranks says nothing about which of them is slow


@dataclass(frozen=True)
class Straggler:
    """A slow rank: the first step since which it is slow, and what it costs per step."""

    rank: int
    since: int
    seconds: float  # more than the median of the ranks with the same stage
    whole_node: bool = False  # whether most ranks of its node are slow: then the node is at fault, not the rank


@dataclass(frozen=True)
class StragglerReport:
    """A rank that has become a straggler. The first rank has it, once for each straggler: see `RankMonitor`."""

    step: int
    rank: int
    since: int  # the first step since which it is slow
    seconds: float  # that it costs per step
    percent: float  # of a step
    whole_node: bool  # whether most ranks of its node are slow


@dataclass
class _SlowRank:
    """A rank that has been slow: since which step, in how many reports, and in how many it was not since then."""

    since: int
    num_reports: int = 0
    num_others: int = 0

    @property
    def max_others(self) -> int:
        """In how many reports one after the other it must not be slow to be forgotten."""
        return _MIN_REPORTS if self.num_reports >= _MIN_REPORTS else 1


class StragglerCheck:
    """Compares the ranks of each stage, which have the same work, from report to report."""

    def __init__(self, topology: Topology, min_percent: float = 10.0) -> None:
        self._topology, self._min_fraction = topology, min_percent / 100
        self._slow: dict[int, _SlowRank] = {}  # by rank

    def add(self, first_step: int, seconds: float, busy: Sequence[float], nodes: Sequence[float]) -> Straggler | None:
        """Add the busy times of all ranks since `first_step`; `seconds` is the time of a step.

        `nodes` has the number of each rank's node: launchers may place ranks on nodes in any order.
        All ranks of a slow node are slow, each a bit more than the others now and then, so each counts for itself.
        """
        excesses = {rank: excess for excess, rank in self._excesses(busy)}
        for rank, excess in excesses.items():
            if excess >= self._min_fraction * seconds:
                slow = self._slow.setdefault(rank, _SlowRank(first_step))
                slow.num_reports, slow.num_others = slow.num_reports + 1, 0
            elif rank in self._slow:
                self._slow[rank].num_others += 1
        self._slow = {rank: slow for rank, slow in self._slow.items() if slow.num_others < slow.max_others}
        stragglers = [rank for rank, slow in self._slow.items() if slow.num_reports >= _MIN_REPORTS]
        if not stragglers:
            return None
        rank = max(stragglers, key=lambda rank: excesses[rank])
        return Straggler(rank, self._slow[rank].since, max(0.0, excesses[rank]), self._is_node_slow(rank, nodes))

    def _is_node_slow(self, rank: int, nodes: Sequence[float]) -> bool:
        """Whether most ranks of a rank's node are slow."""
        node_ranks = [peer for peer, node in enumerate(nodes) if node == nodes[rank]]
        return len(node_ranks) > 1 and 2 * sum(peer in self._slow for peer in node_ranks) > len(node_ranks)

    def _excesses(self, busy: Sequence[float]) -> list[tuple[float, int]]:
        """Return each rank, and how much longer it takes than the median of its stage."""
        excesses = []
        for stage in range(self._topology.num_stages):
            ranks = self._topology.stage_ranks(stage)
            middle = median(busy[rank] for rank in ranks)
            excesses += [(busy[rank] - middle, rank) for rank in ranks if len(ranks) >= _MIN_PEERS]
        return excesses
