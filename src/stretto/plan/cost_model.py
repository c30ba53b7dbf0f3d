"""Costs: seconds and bytes of any chunk on any run of blocks, from a profile."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate

from stretto.plan.profile import BlockKind, CostPoint, Link, Profile


@dataclass(frozen=True)
class ChunkCost:
    """What one chunk costs on a stage."""

    forward: float
    backward: float
    saved: float  # bytes kept from the forward to the backward


class CostModel:
    """A profile, asked about runs of blocks, `start` to `stop`; the loss belongs to the last block."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.kinds = [profile.kinds[name] for name in profile.blocks]
        self.num_blocks = len(self.kinds)
        # With a single device nothing is ever sent.
        self.node = profile.node or Link(latency=0.0, bandwidth=1e18)
        self.network = profile.network or self.node
        self._weights = _prefix_sums([kind.weight_bytes for kind in self.kinds])
        self._accumulate = _prefix_sums([kind.accumulate for kind in self.kinds])
        self._optimizer = _prefix_sums([kind.optimizer for kind in self.kinds])
        self._state = _prefix_sums([kind.state_bytes for kind in self.kinds])
        # Sums over blocks from the first, for each shape that was asked about: a run is then a difference.
        self._chunks: Callable[[int, int], list[ChunkCost]] = cache(self._cumulative_costs)

    def chunk(self, start: int, stop: int, rows: int, steps: int) -> ChunkCost:
        """Return what a chunk costs on some blocks, without what the engine adds."""
        sums = self._chunks(rows, steps)
        # The loss comes after the last block, with which it always is.
        last = stop + 1 if stop == self.num_blocks else stop
        before, after = sums[start], sums[last]
        return ChunkCost(
            after.forward - before.forward, after.backward - before.backward, max(after.saved - before.saved, 0.0)
        )

    def accumulate(self, start: int, stop: int) -> float:
        """Return what a backward takes longer that adds to gradients which are there."""
        return self._accumulate[stop] - self._accumulate[start]

    def optimizer(self, start: int, stop: int) -> float:
        """Return the seconds from gradients to new weights."""
        return self._optimizer[stop] - self._optimizer[start]

    def weight_bytes(self, start: int, stop: int) -> float:
        return self._weights[stop] - self._weights[start]

    def state_bytes(self, start: int, stop: int) -> float:
        return self._state[stop] - self._state[start]

    def sent_bytes(self, stop: int) -> float:
        """Return the size of one step of one row where it leaves the block before `stop`."""
        return self.kinds[stop - 1].output_bytes

    def _cumulative_costs(self, rows: int, steps: int) -> list[ChunkCost]:
        by_kind: dict[int, ChunkCost] = {}
        sums = [ChunkCost(0.0, 0.0, 0.0)]
        for kind in [*self.kinds, self.profile.loss]:
            if id(kind) not in by_kind:
                by_kind[id(kind)] = interpolate(kind, rows, steps)
            own, last = by_kind[id(kind)], sums[-1]
            sums.append(ChunkCost(last.forward + own.forward, last.backward + own.backward, last.saved + own.saved))
        return sums

    @cached_property
    def speeds(self) -> "ContentionModel":
        return ContentionModel(self.profile)

    def all_reduce_seconds(self, num_bytes: float, num_ranks: int, num_nodes: int) -> float:
        """Return how long it takes to add up gradients over some ranks, evenly on some nodes.

        As measured, where it was. Else by what such algorithms reach: inside a node each byte passes each link about
        twice (a ring); between nodes each rank of a node carries its part of the bytes, and the number of messages
        one after the other grows with the logarithm of the number of nodes (trees).
        """
        if num_ranks == 1 or num_bytes == 0:
            return 0.0
        per_node = math.ceil(num_ranks / num_nodes)
        seconds = 0.0
        if per_node > 1:
            measured = next((found for found in self.profile.all_reduces if found.ranks == per_node), None)
            if measured is not None:
                seconds += measured.latency + num_bytes / measured.bandwidth
            else:
                seconds += _ring_seconds(num_bytes, per_node, self._between(self.node, per_node))
        if num_nodes > 1:
            seconds += _ring_seconds(num_bytes / per_node, num_nodes, self.network)
        return seconds

    def _between(self, link: Link, num_ranks: int) -> Link:
        """The link that a measured sum of fewer ranks speaks of, if there is one; else as it is."""
        measured = [found for found in self.profile.all_reduces if found.ranks < num_ranks]
        if not measured:
            return link
        most = max(measured, key=lambda found: found.ranks)
        passes = 2 * (most.ranks - 1) / most.ranks
        return Link(latency=link.latency, bandwidth=most.bandwidth * passes)


class ContentionModel:
    """How fast ranks compute that share a node, against the one that was measured."""

    def __init__(self, profile: Profile) -> None:
        self._known = {speed.ranks: speed for speed in profile.speeds}

    def of(self, num_ranks: int, num_busy: int) -> float:
        """Return the speed of each of `num_busy` ranks at work on a node that holds `num_ranks`.

        Together they are as fast as all of them would be, but none is faster than alone.
        """
        if not self._known or num_busy == 0:
            return 1.0
        each, alone = self._at(num_ranks)
        return min(alone, each * num_ranks / num_busy)

    def _at(self, num_ranks: int) -> tuple[float, float]:
        fewer = max((n for n in self._known if n <= num_ranks), default=min(self._known))
        speed = self._known[fewer]
        # More ranks than were measured share what those had.
        return speed.contended * min(1.0, fewer / num_ranks), speed.solo


def interpolate(kind: BlockKind, rows: int, steps: int) -> ChunkCost:
    """Return a chunk's cost between the points that were measured, linear in rows and in steps; beyond them too."""
    at = {(point.rows, point.steps): point for point in kind.points}
    # Of nothing, nothing: so a single point is taken in proportion.
    nothing = CostPoint(rows=1, steps=1, forward=0, backward=0, saved=0)
    row_pair, row_part = _between(kind.rows, rows)
    step_pair, step_part = _between(kind.steps, steps)

    def blend(what: Callable[[CostPoint], float]) -> float:
        low, high = (
            what(at.get((row, step_pair[0]), nothing)) * (1 - step_part)
            + what(at.get((row, step_pair[1]), nothing)) * step_part
            for row in row_pair
        )
        # Never less than the least that was measured of so few.
        least = min(what(point) for point in kind.points) * min(1.0, rows * steps / (kind.rows[0] * kind.steps[0]))
        return max(low * (1 - row_part) + high * row_part, least)

    return ChunkCost(
        blend(lambda point: point.forward), blend(lambda point: point.backward), blend(lambda point: point.saved)
    )


def _between(known: Sequence[int], value: int) -> tuple[tuple[int, int], float]:
    """The two known numbers around a value, or nearest to it, and how far it is from the first to the second."""
    if len(known) == 1:
        return (0, known[0]), value / known[0]
    index = min(max(bisect_right(known, value), 1), len(known) - 1)
    low, high = known[index - 1], known[index]
    return (low, high), (value - low) / (high - low)


def _ring_seconds(num_bytes: float, num_ranks: int, link: Link) -> float:
    passes = 2 * (num_ranks - 1) / num_ranks
    return passes * num_bytes / link.bandwidth + 2 * math.ceil(math.log2(num_ranks)) * link.latency


def _prefix_sums(values: Sequence[float]) -> list[float]:
    return list(accumulate(values, initial=0.0))
