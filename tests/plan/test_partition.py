from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto import PlanError
from stretto.plan.partition import partition


@given(st.lists(st.floats(0, 10), min_size=1, max_size=9), st.data())
def test_it_is_as_good_as_brute_force(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    parts = partition(costs, stages)
    assert [block for part in parts for block in range(part.start, part.stop)] == list(range(len(costs)))
    assert len(parts) == stages and all(part.start < part.stop for part in parts)
    found = max(sum(costs[part]) for part in parts)
    best = min(
        max(sum(costs[a:b]) for a, b in zip((0, *cuts), (*cuts, len(costs)), strict=True))
        for cuts in combinations(range(1, len(costs)), stages - 1)
    )
    assert found == pytest.approx(best)


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(PlanError, match=r"layout\.stages=5 exceeds the model's 4 blocks; use at most 4"):
        partition([1.0] * 4, 5)
