"""Partitions: which contiguous range of blocks each stage holds."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import PlanError
from stretto.config.layout import Layout

RangeCosts = NDArray[np.float64]
"""The cost of blocks `start:stop` as one stage, at `[start, stop]`; infinite if they can't be one stage."""


def partition(costs: Sequence[float], num_stages: int) -> list[slice]:
    """Return each stage's range of blocks such that the most expensive stage is cheapest, given each block's cost."""
    ranges = range_costs(np.array(list(accumulate(costs, initial=0.0))))
    parts = partition_by_cost(len(costs), num_stages, lambda stage: ranges)
    assert parts is not None  # all costs are finite
    return parts


def look_ahead_share(num_micro_batches: int) -> float:
    """Return the part of a look-ahead block's cost that counts for the balance of the stages.

    While such a block has the first micro-batch, the later stages have nothing to do and the earlier ones wait for its
    backward, wherever it is. Only for the other micro-batches do stages work at the same time as it.
    """
    return 1 - 1 / num_micro_batches


def interleaved_partition(costs: Sequence[float], num_stages: int, interleave: int) -> list[slice]:
    """Return `interleave` ranges of blocks per stage, in rounds over the stages, given each block's cost.

    The most expensive stage is cheap, and so is the most expensive range: it sets the pace of the others.
    """
    num_parts = num_stages * interleave
    if num_parts > len(costs):
        raise PlanError(
            f"layout.stages={num_stages} x layout.interleave={interleave} exceeds the model's number of blocks; use at "
            f"most {len(costs)} runs"
        )
    edges = [0, *(part.stop for part in partition(costs, num_parts))]
    sums = list(accumulate(costs, initial=0.0))

    def score(edges: Sequence[int]) -> tuple[float, float]:
        parts = [sums[stop] - sums[start] for start, stop in pairwise(edges)]
        return max(sum(parts[stage::num_stages]) for stage in range(num_stages)), max(parts)

    best, has_improved = score(edges), True
    while has_improved:  # move single blocks to a neighboring range
        has_improved = False
        for index in _worst_edges(edges, sums, num_stages):
            for step in (-1, 1):
                moved = [*edges[:index], edges[index] + step, *edges[index + 1 :]]
                if moved[index - 1] < moved[index] < moved[index + 1] and (value := score(moved)) < best:
                    edges, best, has_improved = moved, value, True
    return [slice(start, stop) for start, stop in pairwise(edges)]


def _worst_edges(edges: Sequence[int], sums: Sequence[float], num_stages: int) -> list[int]:
    """Return the edges of the ranges of the most expensive stage and of the most expensive range: only these matter."""
    parts = [sums[stop] - sums[start] for start, stop in pairwise(edges)]
    costs = [sum(parts[stage::num_stages]) for stage in range(num_stages)]
    worst = {*range(costs.index(max(costs)), len(parts), num_stages), parts.index(max(parts))}
    return sorted({edge for part in worst for edge in (part, part + 1) if 0 < edge < len(parts)})


def range_costs(sums: NDArray[np.float64]) -> RangeCosts:
    """Return the cost of every range of blocks from prefix sums; infinite for empty ranges."""
    costs = sums[None, :] - sums[:, None]
    costs[np.tril_indices(len(sums))] = np.inf
    return costs


def partition_by_cost(num_blocks: int, num_stages: int, costs: Callable[[int], RangeCosts]) -> list[slice] | None:
    """Return the partition whose most expensive stage is cheapest, or None if every partition has infinite cost.

    `costs(stage)` gives the cost of every range of blocks on a stage. Dynamic programming over stages finds the best.
    Among equally good partitions, earlier stages hold more blocks.
    """
    if num_stages > num_blocks:
        raise PlanError(f"layout.stages={num_stages} exceeds the model's number of blocks; use at most {num_blocks}")
    # most_expensive[n]: the cost of the most expensive stage in the best partition of the first n blocks.
    most_expensive = costs(0)[0]
    cuts: list[NDArray[np.int64]] = []
    for stage in range(1, num_stages):
        values = np.maximum(most_expensive[:, None], costs(stage))  # [cut, n]: if this stage holds blocks cut:n
        # Reversed, so that argmin finds the last of equal minima and earlier stages hold more.
        cuts.append(num_blocks - values[::-1].argmin(axis=0))
        most_expensive = values.min(axis=0)
    if not np.isfinite(most_expensive[num_blocks]):
        return None
    edges = [num_blocks]
    for cut in reversed(cuts):
        edges.append(int(cut[edges[-1]]))
    return [slice(start, stop) for start, stop in pairwise([0, *reversed(edges)])]


def check_block_counts(layout: Layout, num_blocks: int) -> None:
    """Raise unless a layout's `blocks` are all blocks of the model, and each stage has one of its own."""
    blocks = list(layout.blocks)
    if sum(blocks) != num_blocks:
        raise PlanError(
            f"layout.blocks={blocks} has {sum(blocks)} blocks in total, but the model has {num_blocks}; make the "
            f"numbers sum to {num_blocks}"
        )
    if layout.splits_vocab and blocks[-1] == 1:
        raise PlanError(
            f"layout.blocks={blocks} gives the last stage only the output layer, which all stages share with "
            "layout.vocab_parallel=true; give the last stage one more block"
        )


def partition_from_counts(counts: Sequence[int]) -> list[slice]:
    """Return the range of blocks of each stage, given how many blocks each stage has."""
    return [slice(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]
