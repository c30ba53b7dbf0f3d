"""Tied weights in a plan: a copy on each stage that uses them, and an all-reduce of their gradients."""

import pytest
import torch

from helpers.profiles import kind, profile
from stretto import Layout
from stretto.base.errors import ConfigError
from stretto.base.task import Task
from stretto.blocks.network import build_network
from stretto.config.model import ModelConfig
from stretto.measure.tied_blocks import find_tied_blocks
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.predict import Prediction, predict
from stretto.plan.profile import TiedBlocks
from stretto.plan.workload import Workload

KINDS = [kind(weight_bytes=10**6, optimizer=0.01), kind(weight_bytes=10**5), kind(weight_bytes=10**6, optimizer=0.02)]
UNTIED = profile(KINDS)
TIED = profile(KINDS, tied=(TiedBlocks(blocks=(0, 2), weight_bytes=900_000),))


def predictions(layout: Layout, nodes: int = 1) -> tuple[Prediction, Prediction]:
    cluster = Cluster(layout.num_ranks, nodes)
    untied, tied = (predict(CostModel(costs), Workload.of(8, 16), layout, cluster) for costs in (UNTIED, TIED))
    return untied, tied


def test_on_one_stage_a_tied_weight_counts_once() -> None:
    untied, tied = predictions(Layout(replicas=2))
    assert untied.stages[0].memory.weights - tied.stages[0].memory.weights == 900_000
    assert UNTIED.weight_bytes - TIED.weight_bytes == 900_000
    assert untied.optimizer - tied.optimizer == pytest.approx(0.02 * 0.9)
    assert tied.all_reduce < untied.all_reduce, "the replicas reduce it once"
    assert untied.traffic - tied.traffic == pytest.approx(900_000)


@pytest.mark.parametrize("nodes", [1, 3])
def test_each_stage_holds_a_tied_weight_and_reduces_its_gradient(nodes: int) -> None:
    untied, tied = predictions(Layout(stages=3, blocks=(1, 1, 1)), nodes)
    assert [stage.memory for stage in tied.stages] == [stage.memory for stage in untied.stages]
    seconds = CostModel(TIED).all_reduce_seconds(900_000, 2, min(nodes, 2))
    assert seconds > 0
    assert tied.all_reduce - untied.all_reduce == pytest.approx(seconds)
    assert tied.seconds - untied.seconds == pytest.approx(seconds)
    assert tied.traffic - untied.traffic == pytest.approx(900_000, rel=0.01), "the first stage sends the most"


def test_the_tied_weights_of_a_model_are_in_its_profile() -> None:
    with torch.device("meta"):
        model = build_network(ModelConfig(hidden=8, tied=True), Task.language(11))
    assert find_tied_blocks(model) == (TiedBlocks(blocks=(0, 3), weight_bytes=4 * 11 * 8),)
    assert find_tied_blocks(model[:2]) == ()


def test_a_tie_names_blocks_of_the_profile() -> None:
    with pytest.raises(ConfigError, match="tied has 3, which is not the index of a block"):
        profile(KINDS, tied=(TiedBlocks(blocks=(0, 3), weight_bytes=1),))
