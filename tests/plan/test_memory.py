import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.profiles import kind, profile, profiles
from stretto import Layout
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.memory import all_memory_totals, rank_memory
from stretto.plan.predict import predict
from stretto.plan.profile import Profile
from stretto.plan.workload import Workload


@given(profiles(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.booleans())
def test_the_memory_of_all_ranges_at_once_equals_that_of_each(
    drawn: Profile, stages: int, micro_batches: int, chunks: int, recompute: bool
) -> None:
    costs = CostModel(drawn)
    layout = Layout(stages=stages, micro_batches=micro_batches, chunks=chunks, recompute=recompute)
    totals = all_memory_totals(costs, layout, 4, 6)
    for stage in range(stages):
        for start in range(costs.num_blocks):
            for stop in range(start + 1, costs.num_blocks + 1):
                one = rank_memory(costs, layout, stage, slice(start, stop), 4, 6).total
                assert totals(stage)[start, stop] == pytest.approx(one)


@pytest.mark.parametrize("chunks", [1, 3, 4, 6, 12])
def test_a_window_split_unevenly_needs_at_least_the_memory_of_the_whole(chunks: int) -> None:
    costs = CostModel(profile([kind(saved=1e6)]))
    (stage,) = predict(costs, Workload.of(8, 16), Layout(chunks=chunks), Cluster(1)).stages
    assert stage.memory.activations >= 1e6
