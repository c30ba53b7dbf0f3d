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
    """A slow rank: the first step of the time in which it was the slowest, and what it costs per step."""

    rank: int
    since: int
    seconds: float  # more than the median of the ranks with the same stage


class StragglerCheck:
    """Compares the ranks of each stage, which have the same work, from report to report."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._last_step = 0
        self._rank: int | None = None  # the slowest in the last reports
        self._since = self._num_reports = 0

    def add(self, step: int, seconds: float, busy: Sequence[float]) -> Straggler | None:
        """Add the busy times of all ranks since the last report; `seconds` is the time of a step."""
        excess, rank = max(self._excesses(busy), default=(0.0, -1))
        if excess < _MIN_FRACTION * seconds:
            self._rank = None
        elif rank == self._rank:
            self._num_reports += 1
        else:
            self._rank, self._since, self._num_reports = rank, self._last_step + 1, 1
        self._last_step = step
        is_straggler = self._rank is not None and self._num_reports >= _MIN_REPORTS
        return Straggler(rank, self._since, excess) if is_straggler else None

    def _excesses(self, busy: Sequence[float]) -> list[tuple[float, int]]:
        """Return each rank, and how much longer it takes than the median of its stage."""
        excesses = []
        for stage in range(self._topology.num_stages):
            ranks = self._topology.stage_ranks(stage)
            middle = median(busy[rank] for rank in ranks)
            excesses += [(busy[rank] - middle, rank) for rank in ranks if len(ranks) >= _MIN_PEERS]
        return excesses
