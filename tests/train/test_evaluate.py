import math

import pytest

from stretto import (
    LSTM,
    Corpus,
    Embedding,
    Evaluation,
    Lanes,
    Linear,
    LocalEngine,
    Stack,
    TokenLoss,
    evaluate,
    initialize,
)


def test_evaluation_covers_every_token_once_however_it_is_cut(byte_corpus: Corpus) -> None:
    # Without memory, lanes and windows can't matter at all.
    engine = LocalEngine(initialize(Stack([Embedding(256, 4), Linear(4, 256)]).double(), 1), TokenLoss())
    found = [evaluate(engine, Lanes(byte_corpus, lanes, window)) for lanes, window in ((1, 100), (7, 33), (50, 1))]
    for evaluation in found:
        assert evaluation.tokens == byte_corpus.num_tokens - 1
        assert evaluation.loss == pytest.approx(found[0].loss, rel=1e-12)


def test_state_is_carried_from_window_to_window(byte_corpus: Corpus) -> None:
    engine = LocalEngine(initialize(Stack([Embedding(256, 4), LSTM(4, 8), Linear(8, 256)]).double(), 1), TokenLoss())
    long = evaluate(engine, Lanes(byte_corpus, 3, 1000))
    short = evaluate(engine, Lanes(byte_corpus, 3, 10))
    assert short.loss == pytest.approx(long.loss, rel=1e-9)


def test_figures_follow_from_the_loss() -> None:
    evaluation = Evaluation(total=math.log(8) * 10, tokens=10, bytes_per_token=4.0)
    assert evaluation.loss == pytest.approx(math.log(8))
    assert evaluation.perplexity == pytest.approx(8)
    assert evaluation.bits_per_byte == pytest.approx(3 / 4)
    assert Evaluation(1e6, 1).perplexity == math.inf
    assert Evaluation(1.0, 1).bits_per_byte is None


def test_progress_is_told(byte_corpus: Corpus) -> None:
    engine = LocalEngine(initialize(Stack([Embedding(256, 4), Linear(4, 256)]), 1), TokenLoss())
    seen: list[float] = []
    lanes = Lanes(byte_corpus, 10, 500)
    evaluate(engine, lanes, on_window=seen.append)
    assert seen == [done / lanes.num_windows for done in range(1, lanes.num_windows + 1)]
