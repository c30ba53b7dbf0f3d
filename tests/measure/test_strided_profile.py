"""Profiles of strided models: measured, and derived from a data sheet."""

import pytest
import torch

from helpers.row_loss_cases import RaggedRows, RowCase, make_model
from stretto import Layout
from stretto.measure.profile import measure_profile
from stretto.measure.profile_input import ProfileInput
from stretto.measure.shapes import block_shapes
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.hardware import derive_profile, find_hardware
from stretto.plan.predict import predict

CASE = RowCase("ctc", window=24, strides=(2, 3, 1), dtype=torch.float32)


@pytest.mark.long
def test_a_measured_profile_has_the_strides_of_the_blocks() -> None:
    (model, loss), data = make_model(CASE), RaggedRows(CASE)
    profile = measure_profile(model, loss, data)
    costs = CostModel(profile)
    assert costs.stride == 6 and [profile.kinds[name].stride for name in profile.blocks] == [2, 1, 1, 3, 1, 1]
    workload = ProfileInput(model, loss, data, torch.optim.AdamW, torch.device("cpu")).workload
    assert workload.stride == 6 and workload.max_chunks == -(-workload.num_steps // 6)
    assert predict(costs, workload, Layout(stages=2, chunks=3, blocks=(3, 3)), Cluster(2)).seconds > 0


def test_a_profile_from_a_data_sheet_has_them_too() -> None:
    with torch.device("meta"):
        model, _ = make_model(CASE)
    shapes = block_shapes(model, RaggedRows(CASE))
    conv = shapes[3]
    assert (conv.name, conv.stride, conv.recurrent) == ("causalconv", 3, 0)
    costs = CostModel(derive_profile(find_hardware("A100"), shapes, 8, 24))
    assert costs.stride == 6 and costs.sent_bytes(1) == 2 * 6 / 2
