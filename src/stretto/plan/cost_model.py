"""The cost model: seconds and bytes of any chunk on any range of blocks, from a profile."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from stretto.plan.profile import BlockKind, CostPoint, Link, Profile


@dataclass(frozen=True)
class ChunkCost:
    """The cost of one chunk on a stage."""

    forward: float
    backward: float
    saved: float  # bytes kept from forward to backward


class CostModel:
    """The costs of ranges of blocks, `start` to `stop`; the loss belongs to the last block."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.kinds = [profile.kinds[name] for name in profile.blocks]
        self.num_blocks = len(self.kinds)
        # With a single device nothing is ever sent.
        self.node = profile.node or Link(latency=0.0, bandwidth=1e18)
        self.network = profile.network or self.node
        self.speeds = ContentionModel(profile)
        self._weights = _prefix_sums([kind.weight_bytes for kind in self.kinds])
        self._accumulate = _prefix_sums([kind.accumulate for kind in self.kinds])
        self._optimizer = _prefix_sums([kind.optimizer for kind in self.kinds])
        self._state = _prefix_sums([kind.state_bytes for kind in self.kinds])
        # Prefix sums over blocks for each shape, so that a range is a difference of two.
        self._chunks: Callable[[int, int], list[ChunkCost]] = cache(self._cumulative_costs)

    def chunk(self, start: int, stop: int, rows: int, steps: int) -> ChunkCost:
        """Return the cost of a chunk on a range of blocks, without the overhead of the engine."""
        sums = self._chunks(rows, steps)
        # The loss is one more entry after the last block.
        last = stop + 1 if stop == self.num_blocks else stop
        before, after = sums[start], sums[last]
        return ChunkCost(
            after.forward - before.forward, after.backward - before.backward, max(after.saved - before.saved, 0.0)
        )

    def accumulate(self, start: int, stop: int) -> float:
        """Return the extra seconds of a backward that adds to existing gradients."""
        return self._accumulate[stop] - self._accumulate[start]

    def optimizer(self, start: int, stop: int) -> float:
        """Return the seconds of gradient norm, scaling and optimizer step."""
        return self._optimizer[stop] - self._optimizer[start]

    def weight_bytes(self, start: int, stop: int) -> float:
        return self._weights[stop] - self._weights[start]

    def state_bytes(self, start: int, stop: int) -> float:
        return self._state[stop] - self._state[start]

    def sent_bytes(self, stop: int) -> float:
        """Return the bytes of one step of one row that the block before `stop` sends to the next stage."""
        return self.kinds[stop - 1].output_bytes

    def _cumulative_costs(self, rows: int, steps: int) -> list[ChunkCost]:
        by_kind: dict[int, ChunkCost] = {}
        sums = [ChunkCost(0.0, 0.0, 0.0)]
        for kind in [*self.kinds, self.profile.loss]:
            if id(kind) not in by_kind:
                by_kind[id(kind)] = interpolate(kind, rows, steps)
            cost, last = by_kind[id(kind)], sums[-1]
            sums.append(ChunkCost(last.forward + cost.forward, last.backward + cost.backward, last.saved + cost.saved))
        return sums

    def all_reduce_seconds(self, num_bytes: float, num_ranks: int, num_nodes: int) -> float:
        """Return the seconds of an all-reduce over ranks that are spread evenly over nodes.

        Uses the measured cost inside a node if there is one. Otherwise assumes a ring inside a node, where each byte
        passes each link about twice. Between nodes each rank of a node carries its share of the bytes, and latency
        grows with the logarithm of the number of nodes, as in a tree.
        """
        if num_ranks == 1 or num_bytes == 0:
            return 0.0
        per_node = math.ceil(num_ranks / num_nodes)
        seconds = 0.0
        if per_node > 1:
            measured = next((cost for cost in self.profile.all_reduces if cost.ranks == per_node), None)
            if measured is not None:
                seconds += measured.latency + num_bytes / measured.bandwidth
            else:
                seconds += _ring_seconds(num_bytes, per_node, self._effective_link(per_node))
        if num_nodes > 1:
            seconds += _ring_seconds(num_bytes / per_node, num_nodes, self.network)
        return seconds

    def _effective_link(self, num_ranks: int) -> Link:
        """The link inside a node, with the bandwidth that a measured all-reduce of fewer ranks reached, if any."""
        measured = [cost for cost in self.profile.all_reduces if cost.ranks < num_ranks]
        if not measured:
            return self.node
        largest = max(measured, key=lambda cost: cost.ranks)
        passes = 2 * (largest.ranks - 1) / largest.ranks
        return Link(latency=self.node.latency, bandwidth=largest.bandwidth * passes)


class ContentionModel:
    """How fast ranks of one node compute, relative to the rank on which blocks were measured."""

    def __init__(self, profile: Profile) -> None:
        self._known = {speed.ranks: speed for speed in profile.speeds}

    def of(self, num_ranks: int, num_busy: int) -> float:
        """Return the speed of each of `num_busy` computing ranks on a node that has `num_ranks`.

        Together they are as fast as all ranks would be, but none is faster than when it computes alone.
        """
        if not self._known or num_busy == 0:
            return 1.0
        contended, solo = self._at(num_ranks)
        return min(solo, contended * num_ranks / num_busy)

    def _at(self, num_ranks: int) -> tuple[float, float]:
        fewer = max((n for n in self._known if n <= num_ranks), default=min(self._known))
        speed = self._known[fewer]
        # If there are more ranks than were measured, they share the cores of those.
        return speed.contended * min(1.0, fewer / num_ranks), speed.solo


def interpolate(kind: BlockKind, rows: int, steps: int) -> ChunkCost:
    """Return the cost of a chunk, interpolated or extrapolated linearly in rows and steps from measured points."""
    at = {(point.rows, point.steps): point for point in kind.points}
    # Zero rows or steps cost nothing, so a single measured point is scaled in proportion.
    zero = CostPoint(rows=1, steps=1, forward=0, backward=0, saved=0)
    row_pair, row_weight = _neighbors(kind.rows, rows)
    step_pair, step_weight = _neighbors(kind.steps, steps)
    size_ratio = min(1.0, rows * steps / (kind.rows[0] * kind.steps[0]))

    def blend(value_of: Callable[[CostPoint], float]) -> float:
        low, high = (
            value_of(at.get((row, step_pair[0]), zero)) * (1 - step_weight)
            + value_of(at.get((row, step_pair[1]), zero)) * step_weight
            for row in row_pair
        )
        # Extrapolation must not go below the smallest measured value, in proportion to its size.
        least = min(value_of(point) for point in kind.points) * size_ratio
        return max(low * (1 - row_weight) + high * row_weight, least)

    return ChunkCost(
        blend(lambda point: point.forward), blend(lambda point: point.backward), blend(lambda point: point.saved)
    )


def _neighbors(known: Sequence[int], value: int) -> tuple[tuple[int, int], float]:
    """The two known numbers around or nearest to a value, and its relative distance from the first to the second."""
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
