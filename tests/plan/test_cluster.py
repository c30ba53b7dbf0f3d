import pytest

from stretto import Layout
from stretto.errors import PlanError
from stretto.mesh.topology import Topology
from stretto.plan import Cluster


@pytest.mark.parametrize("adjacent", ["stages", "replicas"])
@pytest.mark.parametrize(("replicas", "stages"), [(1, 1), (2, 2), (4, 2), (12, 2), (3, 4), (2, 8), (5, 3), (16, 1)])
def test_the_nodes_of_a_layout_are_those_of_its_ranks(replicas: int, stages: int, adjacent: str) -> None:
    layout = Layout(replicas=replicas, stages=stages, adjacent=adjacent)  # type: ignore[arg-type]
    topology = Topology(replicas, stages, layout.adjacent)
    cluster = Cluster(32, 4)
    for stage in range(stages - 1):
        pairs = [(topology.rank(replica, stage), topology.rank(replica, stage + 1)) for replica in range(replicas)]
        assert cluster.crosses_nodes(layout, stage) == any(a // 8 != b // 8 for a, b in pairs)
    nodes = max(len({rank // 8 for rank in topology.stage_ranks(stage)}) for stage in range(stages))
    assert cluster.num_nodes_of_stage(layout) == nodes
    assert cluster.ranks_on_node(layout) == min(8, replicas * stages)


def test_an_impossible_number_of_devices_is_rejected() -> None:
    for devices, nodes in ((0, 1), (4, 0), (-1, 1)):
        with pytest.raises(PlanError, match="must be positive; use at least 1 of each"):
            Cluster(devices, nodes)
    with pytest.raises(PlanError, match="devices=5 is not a multiple of nodes=2"):
        Cluster(5, 2)
    with pytest.raises(PlanError, match="memory=0 must be positive"):
        Cluster(1, 1, 0)
