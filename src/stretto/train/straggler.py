"""StragglerCheck: finds a rank that takes longer than the others with the same work, so that all wait for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from stretto.mesh.topology import Topology

# A rank is a straggler if it costs all others this fraction of each step, in so many reports one after the other.
_MIN_FRACTION, _MIN_REPORTS = 0.1, 3
_MIN_PEERS = 3  # the median of two ranks says nothing about which of them is slow


@dataclass(frozen=True)
class Straggler:
    """A slow rank: the first step since which it is slow, and what it costs per step."""

    rank: int
    since: int
    seconds: float  # more than the median of the ranks with the same stage
    whole_node: bool = False  # whether most ranks of its node are slow: then the node is at fault, not the rank


class StragglerCheck:
    """Compares the ranks of each stage, which have the same work, from report to report."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._slow_since: dict[int, tuple[int, int]] = {}  # by slow rank: its first step, and the number of reports

    def add(self, first_step: int, seconds: float, busy: Sequence[float], nodes: Sequence[float]) -> Straggler | None:
        """Add the busy times of all ranks since `first_step`; `seconds` is the time of a step.

        `nodes` has the number of each rank's node: launchers may place ranks on nodes in any order.
        All ranks of a slow node are slow, each a bit more than the others now and then, so each counts for itself.
        """
        slow = {rank: excess for excess, rank in self._excesses(busy) if excess >= _MIN_FRACTION * seconds}
        counts = {rank: self._slow_since.get(rank, (first_step, 0)) for rank in slow}
        self._slow_since = {rank: (since, num_reports + 1) for rank, (since, num_reports) in counts.items()}
        stragglers = [rank for rank, (_, num_reports) in self._slow_since.items() if num_reports >= _MIN_REPORTS]
        if not stragglers:
            return None
        rank = max(stragglers, key=lambda rank: slow[rank])
        return Straggler(rank, self._slow_since[rank][0], slow[rank], self._is_node_slow(rank, nodes))

    def _is_node_slow(self, rank: int, nodes: Sequence[float]) -> bool:
        """Whether most ranks of a rank's node are slow."""
        node_ranks = [peer for peer, node in enumerate(nodes) if node == nodes[rank]]
        return len(node_ranks) > 1 and 2 * sum(peer in self._slow_since for peer in node_ranks) > len(node_ranks)

    def _excesses(self, busy: Sequence[float]) -> list[tuple[float, int]]:
        """Return each rank, and how much longer it takes than the median of its stage."""
        excesses = []
        for stage in range(self._topology.num_stages):
            ranks = self._topology.stage_ranks(stage)
            middle = median(busy[rank] for rank in ranks)
            excesses += [(busy[rank] - middle, rank) for rank in ranks if len(ranks) >= _MIN_PEERS]
        return excesses
