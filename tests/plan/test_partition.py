import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import PlanError
from stretto.plan.partition import partition, partition_by_cost, partition_from_counts


@given(st.lists(st.floats(0, 10), min_size=1, max_size=9), st.data())
def test_a_partition_is_as_good_as_brute_force(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    parts = partition(costs, stages)
    assert [block for part in parts for block in range(part.start, part.stop)] == list(range(len(costs)))
    assert len(parts) == stages and all(part.start < part.stop for part in parts)
    slowest = max(sum(costs[part]) for part in parts)
    best = min(
        max(sum(costs[a:b]) for a, b in zip((0, *cuts), (*cuts, len(costs)), strict=True))
        for cuts in combinations(range(1, len(costs)), stages - 1)
    )
    assert slowest == pytest.approx(best)


def test_more_stages_than_blocks_are_rejected() -> None:
    with pytest.raises(PlanError, match=r"layout\.stages=5 exceeds the model's number of blocks; use at most 4"):
        partition([1.0] * 4, 5)


@given(st.integers(1, 7), st.data())
def test_any_cost_of_a_range_is_minimized_as_by_brute_force(num_blocks: int, data: st.DataObject) -> None:
    """Whatever stages cost: what they send, what they may not hold."""
    stages = data.draw(st.integers(1, num_blocks))
    values = st.one_of(st.floats(0, 10), st.just(math.inf))
    costs = np.full((stages, num_blocks + 1, num_blocks + 1), math.inf)
    for stage in range(stages):
        for start, stop in combinations(range(num_blocks + 1), 2):
            costs[stage, start, stop] = data.draw(values)
    parts = partition_by_cost(num_blocks, stages, lambda stage: costs[stage])
    best = min(
        max(costs[stage, a, b] for stage, (a, b) in enumerate(zip((0, *cuts), (*cuts, num_blocks), strict=True)))
        for cuts in combinations(range(1, num_blocks), stages - 1)
    )
    if parts is None:
        assert math.isinf(best)
        return
    assert [block for part in parts for block in range(part.start, part.stop)] == list(range(num_blocks))
    assert max(costs[stage, part.start, part.stop] for stage, part in enumerate(parts)) == best


def test_counts_of_blocks_become_slices() -> None:
    assert partition_from_counts([2, 1, 3]) == [slice(0, 2), slice(2, 3), slice(3, 6)]
