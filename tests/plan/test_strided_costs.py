"""Plans for strided models: later blocks run on fewer time steps, and chunks start at multiples of the stride."""

import pytest

from helpers.profiles import kind, profile
from stretto.config.layout import Layout
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.memory import all_memory_totals, rank_memory
from stretto.plan.predict import predict
from stretto.plan.search import find_plan
from stretto.plan.workload import Workload

FRAMES = kind(1e-4, 1e-4, output_bytes=32.0).model_copy(update={"stride": 4})
COSTS = CostModel(profile([FRAMES, kind(), kind(output_bytes=16.0)]))


def test_blocks_after_a_stride_cost_as_much_as_on_fewer_time_steps() -> None:
    alone = CostModel(profile([kind()]))
    assert COSTS.stride == 4
    for steps, num_strided in ((16, 4), (13, 4), (12, 3), (3, 1)):
        assert COSTS.chunk_cost(1, 2, 8, steps).forward == pytest.approx(alone.chunk_cost(0, 1, 8, num_strided).forward)
    assert COSTS.chunk_cost(0, 1, 8, 16).forward == pytest.approx(1e-4)
    assert COSTS.loss_cost(8, 16) == CostModel(profile([kind()])).loss_cost(8, 4)


def test_messages_are_sent_for_each_output() -> None:
    assert [COSTS.sent_bytes(stop) for stop in (1, 2, 3)] == [32 / 4, 8 / 4, 16 / 4]
    workload, cluster = Workload.of(8, 16), Cluster(2)
    layout = Layout(stages=2, blocks=(1, 2))
    assert predict(COSTS, workload, layout, cluster).traffic == 8 * 16 * 32 / 4
    memory = rank_memory(COSTS, layout, 1, slice(1, 3), 8, 16)
    assert memory.messages == 3 * 8 * 16 * 32 / 4
    assert all_memory_totals(COSTS, layout, 8, 16)(1)[1, 3] == pytest.approx(memory.total)


def test_chunks_of_a_workload_start_at_multiples_of_the_stride() -> None:
    workload = Workload([[23, 9, 4]], stride=4)
    assert workload.max_chunks == 6
    ((shape,),) = workload.split(1, 1, 4)
    assert shape.chunk_bounds == ((0, 4), (4, 12), (12, 16), (16, 23)) and shape.rows_per_chunk == (3, 2, 1, 1)
    after = shape.after_stride(4)
    assert after.chunk_bounds == ((0, 1), (1, 3), (3, 4), (4, 6)) and after.rows_per_chunk == shape.rows_per_chunk
    ((short,),) = Workload([[5, 2]], stride=4).split(1, 1, 8)
    assert short.chunk_bounds == ((0, 4), (4, 5))


def test_a_plan_for_a_strided_model_is_faster_and_has_no_more_chunks_than_outputs() -> None:
    cluster, workload = Cluster(2), Workload([[16] * 8], stride=4)
    strided = find_plan(COSTS.profile, workload, cluster)
    plain = find_plan(profile([kind(1e-4, 1e-4), kind(), kind()]), Workload.of(8, 16), cluster)
    assert strided.single_device.seconds < plain.single_device.seconds / 2
    assert all(prediction.layout.chunks <= 4 for prediction in strided.best)
