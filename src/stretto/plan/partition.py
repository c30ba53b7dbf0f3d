"""Partition: which contiguous run of blocks each stage holds."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from stretto.base.errors import PlanError

RunCost = Callable[[int, int, int], float]
"""What blocks `start` to `stop` cost as a stage: `(stage, start, stop)`. Infinite where they can't be one."""


def partition(costs: Sequence[float], num_stages: int) -> list[slice]:
    """Return the blocks of each stage, so that the slowest stage is as fast as it can be.

    Of equally good partitions, the one whose earlier stages hold more is taken.
    """
    sums = [0.0, *accumulate(costs)]
    parts = partition_by(len(costs), num_stages, lambda stage, start, stop: sums[stop] - sums[start])
    assert parts is not None
    return parts


def partition_by(num_blocks: int, num_stages: int, cost: RunCost) -> list[slice] | None:
    """Return the partition whose dearest stage is cheapest, whatever a run of blocks costs; none if none is finite.

    Exact, by dynamic programming: `stages * blocks^2` calls of `cost`.
    """
    if num_stages > num_blocks:
        raise PlanError(f"layout.stages={num_stages} exceeds the model's {num_blocks} blocks; use at most {num_blocks}")
    # dearest[n]: the best that the first n blocks can do on as many stages as were looked at so far.
    dearest = [math.inf, *(cost(0, 0, stop) for stop in range(1, num_blocks + 1))]
    cuts: list[list[int]] = []
    for stage in range(1, num_stages):
        best = [math.inf] * (num_blocks + 1)
        cut = [stage] * (num_blocks + 1)
        for stop in range(stage + 1, num_blocks + 1):
            for start in range(stage, stop):
                value = max(dearest[start], cost(stage, start, stop))
                if value <= best[stop]:
                    best[stop], cut[stop] = value, start
        dearest = best
        cuts.append(cut)
    if math.isinf(dearest[num_blocks]):
        return None
    edges = [num_blocks]
    for cut in reversed(cuts):
        edges.append(cut[edges[-1]])
    edges.append(0)
    edges.reverse()
    return [slice(start, stop) for start, stop in pairwise(edges)]


def parts_of(counts: Sequence[int]) -> list[slice]:
    """Return the blocks of each stage, from how many each holds."""
    return [slice(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]
