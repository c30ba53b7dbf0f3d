"""Predictions for an output layer that is split over the stages: time, memory and traffic."""

import pytest

from helpers.profiles import kind, profile
from stretto import Layout
from stretto.plan.actions import ActionKind
from stretto.plan.bounds import LowerBounds
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.head_schedule import max_live_chunks_with_head
from stretto.plan.memory import num_communicators, rank_memory
from stretto.plan.one_layout import balance
from stretto.plan.predict import Prediction, predict, predict_timeline
from stretto.plan.profile import Profile, TiedBlocks
from stretto.plan.search import find_plan
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


TABLE = kind(forward=1e-4, weight_bytes=64_000_000, output_bytes=64)
TIED_HEAD = kind(forward=8e-3, backward=16e-3, weight_bytes=65_000_000)
TIED = profile([TABLE, LSTM, LSTM, TIED_HEAD], tied=(TiedBlocks(blocks=(0, 3), weight_bytes=64_000_000),))


def test_a_tied_table_is_split_and_its_gradients_are_not_summed_over_stages() -> None:
    layout = Layout(stages=2, chunks=4, blocks=(2, 2))
    copied = predict(CostModel(TIED), WORK, layout, Cluster(2))
    split = predict(CostModel(TIED), WORK, layout.model_copy(update={"vocab_parallel": True}), Cluster(2))
    assert [stage.memory.weights for stage in copied.stages] == [65e6, 66e6]
    assert [stage.memory.weights for stage in split.stages] == [1e6 + 65e6 / 2] * 2
    assert copied.all_reduce > 0 and split.all_reduce == 0


def test_the_vectors_of_a_split_embedding_count_as_memory() -> None:
    costs = CostModel(TIED)
    vectors = costs.sent_bytes(1) * 4 * 6
    assert vectors > 0
    layout = Layout(stages=2, chunks=4, recompute=True, vocab_parallel=True)
    untied = CostModel(TIED.model_copy(update={"tied": ()}))
    num_live = max_live_chunks_with_head(0, 2, 1, 4)
    for stage, part in enumerate((slice(0, 2), slice(2, 4))):
        tied, other = (rank_memory(each, layout, stage, part, 4, 6) for each in (costs, untied))
        assert tied.messages - other.messages == pytest.approx(3 * vectors)
        # The embedding itself saves something in the untied model.
        saved = 0.0 if stage else untied.chunk_cost(0, 2, 4, 6).saved - untied.chunk_cost(1, 2, 4, 6).saved
        kept = 0.0 if stage else num_live * vectors
        assert tied.activations - other.activations == pytest.approx(kept - saved)


@pytest.mark.parametrize("vocab_parallel", [False, True])
def test_the_all_reduce_of_a_split_embedding_overlaps_with_nothing(vocab_parallel: bool) -> None:
    layout = Layout(replicas=2, stages=2, chunks=4, blocks=(2, 2), vocab_parallel=vocab_parallel)
    work, seconds = Workload.of(8, 1024), []
    for overlap in (0.0, 0.9):
        costs = CostModel(TIED.model_copy(update={"overlap": overlap}))
        seconds.append(predict(costs, work, layout, Cluster(4)).seconds)
    assert (seconds[0] == seconds[1]) == vocab_parallel


def test_lookups_are_in_the_predicted_timeline() -> None:
    layout = Layout(stages=2, chunks=4, blocks=(2, 2), vocab_parallel=True)
    timeline = predict_timeline(CostModel(TIED), WORK, layout, Cluster(2))
    assert not timeline.stuck
    for kind_of_action in (ActionKind.EMBEDDING, ActionKind.EMBEDDING_GRADIENT):
        stages = [timed.stage for timed in timeline.timed_actions if timed.action.kind is kind_of_action]
        assert sorted(stages) == [0] * 4 + [1] * 4


@pytest.mark.parametrize("base", [PROFILE, TIED], ids=["untied", "tied"])
def test_the_search_splits_the_output_layer_only_where_the_model_allows_it(base: Profile) -> None:
    refused = find_plan(base, WORK, Cluster(2), uses_all=True)
    allowed = find_plan(base.model_copy(update={"vocab_rows": 1000}), WORK, Cluster(2), uses_all=True)
    assert not any(prediction.layout.vocab_parallel for prediction in refused.best)
    assert allowed.chosen.layout.vocab_parallel
    assert allowed.chosen.seconds < refused.chosen.seconds


@pytest.mark.parametrize("base", [PROFILE, TIED], ids=["untied", "tied"])
def test_bounds_of_a_split_output_layer_are_not_above_its_prediction(base: Profile) -> None:
    costs, cluster = CostModel(base), Cluster(2)
    bounds = LowerBounds(costs, WORK, cluster)
    for micro_batches, chunks in ((1, 1), (1, 4), (2, 4), (4, 2)):
        layout = Layout(stages=2, micro_batches=micro_batches, chunks=chunks, vocab_parallel=True)
        layout = balance(base, WORK, cluster, layout)
        seconds = predict(costs, WORK, layout, cluster).seconds
        assert bounds.loose_bound(layout) <= seconds + 1e-12
        assert bounds.tight_bound(layout) <= seconds + 1e-12
