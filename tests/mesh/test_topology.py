import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import PlanError
from stretto.mesh.topology import Topology


@given(st.integers(1, 64), st.integers(1, 64))
@settings(deadline=None)
def test_ranks_and_positions_are_one_to_one(replicas: int, stages: int) -> None:
    topology = Topology(replicas, stages)
    positions = [topology.position(rank) for rank in range(topology.size)]
    assert len(set(positions)) == topology.size == replicas * stages
    assert [topology.rank(position.replica, position.stage) for position in positions] == list(range(topology.size))
    for stage in range(stages):
        assert [topology.position(rank).stage for rank in topology.stage_ranks(stage)] == [stage] * replicas
    assert topology.replica_ranks(0) == list(range(stages)), "neighboring stages are neighboring ranks"


def test_a_rank_beyond_the_grid_is_refused() -> None:
    with pytest.raises(PlanError, match=r"rank 6 does not exist in a grid of 2 x 3 \(replicas x stages\)"):
        Topology(2, 3).position(6)
