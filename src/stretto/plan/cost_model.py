"""CostModel: the time and memory that any chunk takes on any range of blocks, interpolated from a profile."""

import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from stretto.config.layout import Layout
from stretto.plan.profile import CostPoint, KindCosts, Link, Profile


@dataclass(frozen=True)
class ChunkCost:
    """The cost of one chunk on a range of blocks."""

    forward: float  # seconds
    backward: float  # seconds
    saved: float  # bytes kept from forward to backward


_NOTHING = ChunkCost(0.0, 0.0, 0.0)


class CostModel:
    """The costs of ranges of blocks, `start` up to but not including `stop`; the last block includes the loss.

    Adjacent blocks that can run in one call do so if they are in the same range: then each but the first of them costs
    less than by itself. Numbers of time steps are those of the model's inputs; blocks after a strided one run on fewer.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.block_kinds = [profile.kinds[name] for name in profile.blocks]
        self.num_blocks = len(self.block_kinds)
        # With one device per node, a profile has no link inside a node. Nothing is sent there, so any link will do.
        self.intra_node = profile.intra_node or Link(latency=0.0, bandwidth=1e18)
        self.inter_node = profile.inter_node or self.intra_node
        self.contention = ContentionModel(profile)
        # How many time steps of the model's inputs make one before each block, and one of its outputs.
        self._strides = list(accumulate((kind.stride for kind in self.block_kinds), operator.mul, initial=1))
        # Prefix sums over blocks, so that the cost of a range is a difference of two.
        self._weights = _prefix_sums([kind.weight_bytes for kind in self.block_kinds])
        self._casts = _prefix_sums([kind.cast_bytes for kind in self.block_kinds])
        self._accumulate = _prefix_sums([kind.accumulate for kind in self.block_kinds])
        self._optimizer = _prefix_sums([kind.optimizer for kind in self.block_kinds])
        self._state = _prefix_sums([kind.state_bytes for kind in self.block_kinds])
        # Of the fused blocks, the costs in one call with the block before them.
        fused = {name: _fused_costs(profile.kinds[name]) for name in profile.kinds}
        self._fused_kinds = {index: fused[profile.blocks[index]] for index in profile.fused_blocks}
        self._chunk_sums: Callable[[int, int], tuple[list[ChunkCost], list[ChunkCost]]] = cache(self._sum_chunk_costs)

    def looks_ahead(self, layout: Layout) -> list[bool]:
        """Return whether each block holds up the chunks of a layout: those that look ahead, if there are several."""
        can_wait = layout.chunks > 1 and layout.stages > 1 and not layout.splits_vocab
        return [can_wait and index in self.profile.look_ahead_blocks for index in range(self.num_blocks)]

    @property
    def stride(self) -> int:
        """How many time steps of the model's inputs make one of its outputs."""
        return self._strides[-1]

    def chunk_cost(self, start: int, stop: int, rows: int, steps: int) -> ChunkCost:
        """Return the cost of a chunk on a range of blocks, without `Profile.action_overhead`."""
        sums, savings = self._chunk_sums(rows, steps)
        # The loss is one more entry after the last block.
        low, high = sums[start], sums[stop + 1 if stop == self.num_blocks else stop]
        # The first block of a range has no block before it to be fused with.
        saving = savings[start]
        return ChunkCost(
            high.forward - low.forward + saving.forward,
            high.backward - low.backward + saving.backward,
            high.saved - low.saved + saving.saved,
        )

    def loss_cost(self, rows: int, steps: int) -> ChunkCost:
        """Return the cost of the loss alone, which `chunk_cost` includes in that of the last block."""
        return interpolate(self.profile.loss, rows, -(-steps // self.stride))

    def fusion_savings(self, rows: int, steps: int) -> list[ChunkCost]:
        """Return how much less each block costs in one call with the block before it; one more entry at the end."""
        return self._chunk_sums(rows, steps)[1]

    def accumulate_seconds(self, start: int, stop: int) -> float:
        """Return the extra seconds that a backward takes if it adds to existing gradients."""
        return self._accumulate[stop] - self._accumulate[start]

    def optimizer_seconds(self, start: int, stop: int) -> float:
        """Return the seconds that the gradient norm, scaling and the optimizer step take."""
        repeated = 0.0
        for index, num_bytes in self._repeated_weights(start, stop):
            kind = self.block_kinds[index]
            repeated += kind.optimizer * num_bytes / max(kind.weight_bytes, 1)
        return self._optimizer[stop] - self._optimizer[start] - repeated

    def weight_bytes(self, start: int, stop: int) -> float:
        """Return the bytes of the weights; one that is tied counts once in the range."""
        return self._weights[stop] - self._weights[start] - self.repeated_bytes(start, stop)

    def repeated_bytes(self, start: int, stop: int) -> float:
        """Return the bytes of tied weights that blocks of the range share with an earlier block of the range."""
        return sum(num_bytes for _, num_bytes in self._repeated_weights(start, stop))

    def _repeated_weights(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return each block of the range that shares a weight with an earlier block of it, and the weight's bytes."""
        return [
            (index, tie.weight_bytes)
            for tie in self.profile.tied
            for index in [index for index in tie.blocks if start <= index < stop][1:]
        ]

    @property
    def has_tied_table(self) -> bool:
        """Whether the first and the last block, and no other, share a weight: the table of an embedding and a head."""
        return any(tie.blocks == (0, self.num_blocks - 1) for tie in self.profile.tied)

    def cast_bytes(self, start: int, stop: int) -> float:
        """Return the bytes of the weights' copies in half precision and of the sums of their gradients."""
        return self._casts[stop] - self._casts[start]

    def state_bytes(self, start: int, stop: int) -> float:
        """Return the bytes of one row's state."""
        return self._state[stop] - self._state[start]

    def sent_bytes(self, stop: int) -> float:
        """Return the bytes that a stage ending before block `stop` outputs per row and time step of the model's inputs.

        It sends them to the next stage.
        """
        return self.block_kinds[stop - 1].output_bytes / self._strides[stop]

    def _sum_chunk_costs(self, rows: int, steps: int) -> tuple[list[ChunkCost], list[ChunkCost]]:
        """Return prefix sums of the blocks' and the loss's costs, fused where possible, and what fusing saves."""
        by_kind: dict[tuple[int, int], ChunkCost] = {}  # by id: all blocks of a kind share one KindCosts

        def cost_of(kind: KindCosts, stride: int) -> ChunkCost:
            if (id(kind), stride) not in by_kind:
                by_kind[id(kind), stride] = interpolate(kind, rows, -(-steps // stride))
            return by_kind[id(kind), stride]

        sums, savings = [_NOTHING], []
        for index, (kind, stride) in enumerate(zip([*self.block_kinds, self.profile.loss], self._strides, strict=True)):
            cost, saving, last = cost_of(kind, stride), _NOTHING, sums[-1]
            if index in self._fused_kinds:
                saving = _saving(cost, cost_of(self._fused_kinds[index], stride))
            savings.append(saving)
            sums.append(
                ChunkCost(
                    last.forward + cost.forward - saving.forward,
                    last.backward + cost.backward - saving.backward,
                    last.saved + cost.saved - saving.saved,
                )
            )
        return sums, savings

    def all_reduce_seconds(self, num_bytes: float, num_ranks: int, num_nodes: int) -> float:
        """Return the duration in seconds of an all-reduce over ranks that are spread evenly over nodes.

        Inside a node this is the measured cost if there is one, else an estimate. Between nodes it is always an
        estimate: each rank of a node exchanges an equal share of the tensor with the other nodes.
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
                seconds += _estimate_all_reduce(num_bytes, per_node, self._effective_link(per_node))
        if num_nodes > 1:
            seconds += _estimate_all_reduce(num_bytes / per_node, num_nodes, self.inter_node)
        return seconds

    def _effective_link(self, num_ranks: int) -> Link:
        """Return the intra-node link, with the bus bandwidth measured for the next smaller number of ranks, if any."""
        smaller = [cost for cost in self.profile.all_reduces if cost.ranks < num_ranks]
        if not smaller:
            return self.intra_node
        largest = max(smaller, key=lambda cost: cost.ranks)
        return Link(latency=self.intra_node.latency, bandwidth=largest.bandwidth * _ring_passes(largest.ranks))


class ContentionModel:
    """How fast ranks that share a node's cores compute, relative to the single rank that measured the blocks."""

    def __init__(self, profile: Profile) -> None:
        self._measured = {speed.ranks: speed for speed in profile.speeds}

    def relative_speed(self, num_ranks: int, *, num_busy: int) -> float:
        """Return the speed of each of `num_busy` computing ranks on a node that has `num_ranks`.

        Busy ranks share the total speed of all ranks, but none is faster than when it computes alone.
        """
        if not self._measured or num_busy == 0:
            return 1.0
        measured_ranks = max((count for count in self._measured if count <= num_ranks), default=min(self._measured))
        speed = self._measured[measured_ranks]
        # More ranks than were measured share the same cores, so their total speed stays the same.
        total = speed.contended * min(num_ranks, measured_ranks)
        return min(speed.solo, total / num_busy)


def interpolate(kind: KindCosts, rows: int, steps: int) -> ChunkCost:
    """Return the cost of a chunk, interpolated or extrapolated linearly in rows and steps from the profile's points."""
    points = {(point.rows, point.steps): point for point in kind.points}
    # The cost of a chunk of 0 rows or time steps: nothing. Its rows and steps are unused, but must be at least 1.
    zero = CostPoint(rows=1, steps=1, forward=0, backward=0, saved=0)
    row_pair, row_weight = _neighbors(kind.rows, rows)
    step_pair, step_weight = _neighbors(kind.steps, steps)
    size_ratio = min(1.0, rows * steps / (kind.rows[0] * kind.steps[0]))

    def blend(value_of: Callable[[CostPoint], float]) -> float:
        low, high = (
            value_of(points.get((num_rows, step_pair[0]), zero)) * (1 - step_weight)
            + value_of(points.get((num_rows, step_pair[1]), zero)) * step_weight
            for num_rows in row_pair
        )
        # Extrapolation can give 0 or less. The floor is the smallest known cost, scaled down for even smaller chunks.
        floor = min(value_of(point) for point in kind.points) * size_ratio
        return max(low * (1 - row_weight) + high * row_weight, floor)

    return ChunkCost(
        blend(lambda point: point.forward), blend(lambda point: point.backward), blend(lambda point: point.saved)
    )


def _fused_costs(kind: KindCosts) -> KindCosts:
    return KindCosts(points=kind.fused_points) if kind.fused_points else kind


def _saving(alone: ChunkCost, fused: ChunkCost) -> ChunkCost:
    """Return the difference of two costs, at least 0: extrapolation can make a fused block seem slower."""
    return ChunkCost(
        max(0.0, alone.forward - fused.forward),
        max(0.0, alone.backward - fused.backward),
        max(0.0, alone.saved - fused.saved),
    )


def _neighbors(known: Sequence[int], value: int) -> tuple[tuple[int, int], float]:
    """Return two known numbers to interpolate or extrapolate from, and the weight of the second."""
    if len(known) == 1:  # the other number is 0, where `interpolate` takes the cost as 0
        return (0, known[0]), value / known[0]
    index = min(max(bisect_right(known, value), 1), len(known) - 1)
    low, high = known[index - 1], known[index]
    return (low, high), (value - low) / (high - low)


def _estimate_all_reduce(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Return seconds: the bandwidth term of a ring (NCCL's choice for large tensors) plus a tree's latency term."""
    return _ring_passes(num_ranks) * num_bytes / link.bandwidth + 2 * math.ceil(math.log2(num_ranks)) * link.latency


def _ring_passes(num_ranks: int) -> float:
    """Return the bytes that cross each link of a ring all-reduce, per byte of the tensor."""
    return 2 * (num_ranks - 1) / num_ranks


def _prefix_sums(values: Sequence[float]) -> list[float]:
    return list(accumulate(values, initial=0.0))
