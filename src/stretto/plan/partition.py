"""Partition: which contiguous run of blocks each stage holds."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import PlanError

RangeCosts = NDArray[np.float64]
"""What blocks `start` to `stop` cost as one stage, at `[start, stop]`; infinite where they can't be one."""


def partition(costs: Sequence[float], num_stages: int) -> list[slice]:
    """Return the blocks of each stage, so that the slowest stage is as fast as it can be.

    Of equally good partitions, the one whose earlier stages hold more is taken.
    """
    runs = range_costs(np.array(list(accumulate(costs, initial=0.0))))
    parts = partition_by_cost(len(costs), num_stages, lambda stage: runs)
    assert parts is not None
    return parts


def range_costs(sums: NDArray[np.float64]) -> RangeCosts:
    """Return the cost of every run from the sums over the first blocks; a run of no block is none."""
    costs = sums[None, :] - sums[:, None]
    costs[np.tril_indices(len(sums))] = np.inf
    return costs


def partition_by_cost(num_blocks: int, num_stages: int, costs: Callable[[int], RangeCosts]) -> list[slice] | None:
    """Return the partition whose most expensive stage is cheapest, whatever runs cost on each stage; none if none is finite.

    Exact, by dynamic programming over stages.
    """
    if num_stages > num_blocks:
        raise PlanError(f"layout.stages={num_stages} exceeds the model's {num_blocks} blocks; use at most {num_blocks}")
    # most_expensive[n]: the best that the first n blocks can do on as many stages as were looked at so far.
    most_expensive = costs(0)[0]
    cuts: list[NDArray[np.int64]] = []
    for stage in range(1, num_stages):
        values = np.maximum(most_expensive[:, None], costs(stage))
        # Of equally good ones the last, so that the stages before hold more.
        cuts.append(num_blocks - values[::-1].argmin(axis=0))
        most_expensive = values.min(axis=0)
    if not np.isfinite(most_expensive[num_blocks]):
        return None
    edges = [num_blocks]
    for cut in reversed(cuts):
        edges.append(int(cut[edges[-1]]))
    return [slice(start, stop) for start, stop in pairwise([0, *reversed(edges)])]


def partition_from_counts(counts: Sequence[int]) -> list[slice]:
    """Return the blocks of each stage, from how many each holds."""
    return [slice(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]
