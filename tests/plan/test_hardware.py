"""Costs from data sheets: layers in one call overlap, and a speed-up is relative to one device that does so."""

import pytest

from stretto import Layout
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.hardware import COMMUNICATOR_BYTES, KNOWN_HARDWARE, BlockShape, derive_profile
from stretto.plan.predict import predict
from stretto.plan.profile import Profile
from stretto.plan.search import Plan, find_plan
from stretto.plan.workload import Workload

H100 = KNOWN_HARDWARE["H100"]
LAYERS, STEPS = 8, 256


def lstm(hidden: int, layers: int = 1) -> BlockShape:
    return BlockShape("lstm", 8 * hidden**2 * layers, 0, 4 * hidden**2 * layers, hidden, 8 * hidden, layers=layers)


def derive(hidden: int, rows: int, *, is_fused: bool = True) -> Profile:
    fused_blocks = range(1, LAYERS) if is_fused else ()
    return derive_profile(H100, [lstm(hidden)] * LAYERS, rows, STEPS, fused_blocks=fused_blocks)


def cell_work(hidden: int, rows: int) -> float:
    """Return how long the device works on one cell: the longer of its arithmetic and of reading its weights."""
    arithmetic = 2 * 4 * hidden**2 * rows / (H100.flops * H100.utilization)
    return max(arithmetic, H100.element_size * 4 * hidden**2 / H100.bandwidth)


def recurrent_seconds(profile: Profile, num_layers: int, rows: int) -> float:
    """Return a forward's time without that of the matrix products with the inputs, which fusing does not change."""
    costs = CostModel(profile)
    last = costs.chunk_cost(LAYERS - 1, LAYERS, rows, STEPS).forward
    loss = last - costs.chunk_cost(0, 1, rows, STEPS).forward
    alone = STEPS * (H100.launch_seconds + cell_work(hidden_of(profile), rows))
    inputs = costs.chunk_cost(0, 1, rows, STEPS).forward - alone
    return costs.chunk_cost(LAYERS - num_layers, LAYERS, rows, STEPS).forward - loss - num_layers * inputs


def hidden_of(profile: Profile) -> int:
    return int(profile.kinds["lstm-0"].output_bytes / H100.element_size)


@pytest.mark.parametrize(("hidden", "rows"), [(256, 4), (1024, 64), (4096, 256)])
def test_a_fused_run_takes_its_diagonals_or_the_work_of_all_its_cells(hidden: int, rows: int) -> None:
    work = cell_work(hidden, rows)
    latency_bound = (STEPS + LAYERS - 1) * (H100.launch_seconds + work)
    throughput_bound = LAYERS * STEPS * work
    assert recurrent_seconds(derive(hidden, rows), LAYERS, rows) == pytest.approx(max(latency_bound, throughput_bound))
    separate = LAYERS * STEPS * (H100.launch_seconds + work)
    assert recurrent_seconds(derive(hidden, rows, is_fused=False), LAYERS, rows) == pytest.approx(separate)


def test_the_layers_of_one_block_overlap_like_fused_blocks() -> None:
    as_one = CostModel(derive_profile(H100, [lstm(256, LAYERS)], 4, STEPS)).chunk_cost(0, 1, 4, STEPS)
    as_blocks = CostModel(derive(256, 4)).chunk_cost(0, LAYERS, 4, STEPS)
    # The inputs of the layers of one block count as a single matrix product.
    assert as_one.forward == pytest.approx(as_blocks.forward, rel=0.05)


def plan(profile: Profile, rows: int) -> Plan:
    return find_plan(profile, Workload.of(rows, STEPS), Cluster(LAYERS))


def test_a_speed_up_is_relative_to_one_device_with_fused_layers() -> None:
    fused, separate = plan(derive(256, 4), 4), plan(derive(256, 4, is_fused=False), 4)
    assert fused.single_device.layout == separate.single_device.layout == Layout(blocks=(LAYERS,))
    # Latency-bound layers: in one call, eight of them take hardly longer than one.
    assert separate.single_device.pipeline > 6 * fused.single_device.pipeline
    assert separate.speed_up(separate.chosen) > 1.5, "compared with separate layers, a pipeline seems to gain"
    assert fused.chosen.layout.num_ranks == 1, "one device that runs them in one call is faster"


def test_a_stage_with_several_layers_is_priced_as_fused() -> None:
    workload, layout = Workload.of(4, STEPS), Layout(stages=2, chunks=4, blocks=(4, 4))
    fused, separate = (
        predict(CostModel(derive(256, 4, is_fused=is_fused)), workload, layout, Cluster(2))
        for is_fused in (True, False)
    )
    assert fused.stages[0].busy < 0.5 * separate.stages[0].busy


def test_the_memory_of_communicators_counts_for_a_data_sheet() -> None:
    costs = CostModel(derive(256, 4))
    layout = Layout(stages=2, chunks=4, blocks=(4, 4))
    for stage in predict(costs, Workload.of(4, STEPS), layout, Cluster(2)).stages:
        assert stage.memory.communicators == 3 * COMMUNICATOR_BYTES
