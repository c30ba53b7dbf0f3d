"""Partition: which contiguous run of blocks each stage holds."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from stretto.base.errors import PlanError


def partition(costs: Sequence[float], num_stages: int) -> list[slice]:
    """Return the blocks of each stage, so that the slowest stage is as fast as it can be (exact, O(stages * blocks^2)).

    Of equally good partitions, the one whose earlier stages hold more is taken.
    """
    num_blocks = len(costs)
    if num_stages > num_blocks:
        raise PlanError(f"layout.stages={num_stages} exceeds the model's {num_blocks} blocks; use at most {num_blocks}")
    sums = [0.0, *accumulate(costs)]
    # slowest[n]: the best that the first n blocks can do on as many stages as were looked at so far.
    slowest = [sums[n] if n else float("inf") for n in range(num_blocks + 1)]
    cuts: list[list[int]] = []
    for stage in range(1, num_stages):
        best: list[float] = [float("inf")] * (num_blocks + 1)
        cut = [0] * (num_blocks + 1)
        for stop in range(stage + 1, num_blocks + 1):
            for start in range(stage, stop):
                value = max(slowest[start], sums[stop] - sums[start])
                if value <= best[stop]:
                    best[stop], cut[stop] = value, start
        slowest = best
        cuts.append(cut)
    edges = [num_blocks]
    for cut in reversed(cuts):
        edges.append(cut[edges[-1]])
    edges.append(0)
    edges.reverse()
    return [slice(start, stop) for start, stop in pairwise(edges)]
