import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from helpers.profiles import kind, profile, profiles
from helpers.rank_pool import RankPools
from stretto import Layout, World
from stretto.mesh.mesh import Mesh
from stretto.mesh.topology import Topology
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.memory import all_memory_totals, num_communicators, rank_memory
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


def count_groups(world: World, layout: Layout) -> tuple[int, int]:
    """Return this rank's stage or span, and how many groups of several ranks it is in, with that of the world."""
    sizes = []
    new_group = dist.new_group

    def record(ranks: list[int], **options: object) -> object:
        sizes.append(len(ranks))
        return new_group(ranks, **options)  # type: ignore[arg-type]

    dist.new_group = record  # type: ignore[assignment]
    try:
        topology = Topology(layout.replicas, layout.stages, num_spans=layout.spans)
        mesh = Mesh(world, topology, is_ring=layout.is_interleaved)
    finally:
        dist.new_group = new_group
    return mesh.stage + mesh.span, sum(size > 1 for size in [*sizes, world.size])


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(replicas=2),
        Layout(stages=2),
        Layout(stages=4),
        Layout(replicas=2, stages=2),
        Layout(stages=4, interleave=2),
        Layout(spans=2),
        Layout(replicas=2, spans=2),
    ],
    ids=str,
)
def test_a_rank_has_as_many_communicators_as_its_mesh_has_groups(layout: Layout, pools: RankPools) -> None:
    for column, num_groups in pools[layout.num_ranks].run(count_groups, layout):
        assert num_communicators(layout, column) == num_groups


def test_communicators_count_as_memory_on_several_devices() -> None:
    costs = CostModel(profile([kind()] * 3, communicator_bytes=1e8))
    assert predict(costs, Workload.of(8, 16), Layout(), Cluster(1)).stages[0].memory.communicators == 0
    hybrid = predict(costs, Workload.of(8, 16), Layout(replicas=2, stages=3, blocks=(1, 1, 1)), Cluster(6))
    # All ranks, the replicas of the stage, and two for each neighbor.
    assert [stage.memory.communicators for stage in hybrid.stages] == [4e8, 6e8, 4e8]
    without = predict(CostModel(profile([kind()] * 3)), Workload.of(8, 16), hybrid.layout, Cluster(6))
    assert hybrid.memory == without.memory + 6e8


def test_copies_of_weights_count_as_memory() -> None:
    layout = Layout(stages=3, blocks=(1, 1, 1))
    plans = [
        predict(CostModel(profile([kind(cast_bytes=size)] * 3)), Workload.of(8, 16), layout, Cluster(3))
        for size in (0, 1e8)
    ]
    assert plans[1].memory == plans[0].memory + 1e8
    assert [stage.memory.casts for stage in plans[1].stages] == [1e8] * 3


@pytest.mark.parametrize("chunks", [1, 3, 4, 6, 12])
def test_a_window_split_unevenly_needs_at_least_the_memory_of_the_whole(chunks: int) -> None:
    costs = CostModel(profile([kind(saved=1e6)]))
    (stage,) = predict(costs, Workload.of(8, 16), Layout(chunks=chunks), Cluster(1)).stages
    assert stage.memory.activations >= 1e6
