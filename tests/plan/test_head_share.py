"""Predictions for an output layer that is split over the stages: time, memory and traffic."""

import pytest

from helpers.profiles import kind, profile
from stretto import Layout
from stretto.plan.actions import ActionKind
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.memory import num_communicators
from stretto.plan.predict import Prediction, predict, predict_timeline
from stretto.plan.search import balance
from stretto.plan.workload import Workload

WORK = Workload.of(8, 16)
LSTM, HEAD = (
    kind(forward=1e-3, weight_bytes=1_000_000, output_bytes=64),
    kind(forward=8e-3, backward=16e-3, weight_bytes=64_000_000),
)
PROFILE = profile([LSTM, LSTM, HEAD])
COSTS = CostModel(PROFILE)


def predict_layout(layout: Layout) -> Prediction:
    return predict(COSTS, WORK, layout, Cluster(2))


def test_a_split_head_balances_a_pipeline() -> None:
    plain = predict_layout(Layout(stages=2, chunks=4, blocks=(2, 1)))
    split = predict_layout(Layout(stages=2, chunks=4, blocks=(1, 2), vocab_parallel=True))
    assert split.seconds < 0.7 * plain.seconds
    first, last = split.stages
    assert first.busy == pytest.approx(last.busy, rel=0.05)
    assert split.bubble < plain.bubble


def test_each_stage_holds_its_share_of_the_table() -> None:
    for stages in (2, 3):
        costs = CostModel(profile([LSTM] * stages + [HEAD]))
        blocks = (*[1] * (stages - 1), 2)
        split = predict(costs, WORK, Layout(stages=stages, blocks=blocks, vocab_parallel=True), Cluster(stages))
        for stage in split.stages:
            assert stage.memory.weights == pytest.approx(1e6 + 64e6 / stages)
            assert stage.memory.optimizer == pytest.approx(stage.memory.weights * PROFILE.optimizer_state_ratio)


def test_the_head_is_in_the_predicted_timeline() -> None:
    layout = Layout(stages=2, chunks=4, blocks=(1, 2), vocab_parallel=True)
    timeline = predict_timeline(COSTS, WORK, layout, Cluster(2))
    assert not timeline.stuck
    heads = [timed for timed in timeline.timed_actions if timed.action.kind is ActionKind.HEAD]
    assert [timed.stage for timed in heads].count(0) == [timed.stage for timed in heads].count(1) == 4


def test_blocks_are_balanced_without_the_split_head() -> None:
    layout = Layout(stages=2, chunks=4, vocab_parallel=True)
    assert balance(PROFILE, WORK, Cluster(2), layout).blocks == (1, 2)
    assert balance(PROFILE, WORK, Cluster(2), Layout(stages=2, chunks=4)).blocks == (2, 1)


def test_a_split_head_needs_one_more_communicator() -> None:
    layout = Layout(stages=2)
    split = layout.model_copy(update={"vocab_parallel": True})
    assert num_communicators(split, 0) == num_communicators(layout, 0) + 1
