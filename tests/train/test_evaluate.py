import json
import math
from pathlib import Path

import pytest
from torch import Tensor

from helpers.rank_pool import RankPools
from stretto import Evaluation, Layout, World, evaluate, make_engine
from stretto.data import Batches, Corpus, LabeledItems, Lanes, SequenceOptions, Sequences, prepare_sequences
from stretto.errors import DataError
from stretto.nn import LSTM, CrossEntropy, Embedding, Linear, LossSum, Stack, initialize
from stretto.testing import LocalEngine


def test_evaluation_covers_every_token_once_whatever_the_lanes_and_window(byte_corpus: Corpus) -> None:
    # Without memory, lanes and windows can't matter at all.
    engine = LocalEngine(initialize(Stack([Embedding(256, 4), Linear(4, 256)]).double(), 1), CrossEntropy())
    evaluations = [
        evaluate(engine, Lanes(byte_corpus, lanes, window)) for lanes, window in ((1, 100), (7, 33), (50, 1))
    ]
    for evaluation in evaluations:
        assert evaluation.num_targets == byte_corpus.num_tokens - 1
        assert evaluation.loss == pytest.approx(evaluations[0].loss, rel=1e-12)


@pytest.mark.long
@pytest.mark.short
def test_state_is_carried_from_window_to_window(byte_corpus: Corpus) -> None:
    engine = LocalEngine(initialize(Stack([Embedding(256, 4), LSTM(4, 8), Linear(8, 256)]).double(), 1), CrossEntropy())
    long = evaluate(engine, Lanes(byte_corpus, 3, 1000))
    short = evaluate(engine, Lanes(byte_corpus, 3, 10))
    assert short.loss == pytest.approx(long.loss, rel=1e-9)


def test_scores_follow_from_the_loss() -> None:
    evaluation = Evaluation(total=math.log(8) * 10, num_targets=10, bytes_per_token=4.0)
    assert evaluation.loss == pytest.approx(math.log(8))
    assert evaluation.perplexity == pytest.approx(8)
    assert evaluation.bits_per_byte == pytest.approx(3 / 4)
    assert Evaluation(1e6, 1).perplexity == math.inf
    assert Evaluation(1.0, 1).bits_per_byte is None


def test_targets_without_weight_are_not_called_missing(byte_corpus: Corpus) -> None:
    model = initialize(Stack([Embedding(256, 4), Linear(4, 256)]), 1)
    with pytest.raises(DataError, match=r"all targets of the data have weight 0, .* set class_weights above 0"):
        evaluate(LocalEngine(model, CrossEntropy((0.0,) * 256)), Lanes(byte_corpus, 10, 500))


def test_progress_is_reported_after_each_window(byte_corpus: Corpus) -> None:
    engine = LocalEngine(initialize(Stack([Embedding(256, 4), Linear(4, 256)]), 1), CrossEntropy())
    seen: list[float] = []
    lanes = Lanes(byte_corpus, 10, 500)
    evaluate(engine, lanes, on_window=seen.append)
    assert seen == [done / lanes.num_windows for done in range(1, lanes.num_windows + 1)]


@pytest.fixture(scope="module")
def labeled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labeled")
    lines = ({"text": "abcde"[row % 5 :] * (row % 7 + 1), "kind": row % 3} for row in range(101))
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    prepare_sequences(folder / "a.jsonl", folder / "data", SequenceOptions(label="kind"))
    return folder / "data"


def classifier() -> Stack:
    return Stack([Embedding(256, 4), LSTM(4, 8), Linear(8, 3)]).double()


def batches(data: Path) -> Batches:
    return Batches(LabeledItems(Sequences.open(data)), budget=200)


def mistakes(y: Tensor, targets: Tensor) -> LossSum:
    asked = targets != -100
    return LossSum((y[asked].argmax(dim=1) != targets[asked]).double().sum(), asked.sum())


def test_accuracy_counts_correct_labels(labeled: Path) -> None:
    stack = initialize(classifier(), 1)
    scores = evaluate(LocalEngine(stack, CrossEntropy()), batches(labeled))
    wrong = evaluate(LocalEngine(stack, mistakes), batches(labeled))
    assert scores.num_correct == 101 - wrong.total and 0 < scores.num_correct < 101
    assert scores.scores == {"accuracy": scores.num_correct / 101}
    assert f"accuracy {scores.num_correct / 101:.4f}  (101 labels)" in str(scores)
    assert wrong.accuracy is None and wrong.scores == {}, "a loss that doesn't say what is right has none"


def _count_right(world: World, data: Path, layout: Layout) -> int | None:
    engine = make_engine(classifier(), CrossEntropy(), layout, world, seed=1)
    return evaluate(engine, batches(data)).num_correct


@pytest.mark.parametrize("layout", [Layout(stages=2, chunks=3), Layout(replicas=2, micro_batches=2)], ids=str)
def test_accuracy_is_the_same_in_every_layout(layout: Layout, labeled: Path, pools: RankPools) -> None:
    alone = evaluate(LocalEngine(initialize(classifier(), 1), CrossEntropy()), batches(labeled))
    assert pools[2].run(_count_right, labeled, layout) == [alone.num_correct] * 2
