"""Training on wikitext-2-small gives one curve, in every layout."""

from pathlib import Path

import pytest

from helpers.rank_pool import RankPool
from stretto import Layout, TrainConfig, Trainer, World, make_engine
from stretto.data import Corpus, Lanes, prepare_text
from stretto.nn import LSTM, CrossEntropy, Dropout, Embedding, Linear, Stack


def curve(world: World, folder: Path, layout: Layout) -> list[float]:
    corpus = Corpus.open(folder)
    num_tokens = len(corpus.vocabulary)
    blocks = [Embedding(num_tokens, 32), LSTM(32, 32), Dropout(0.1), LSTM(32, 32), LSTM(32, 32), Linear(32, num_tokens)]
    engine = make_engine(Stack(blocks), CrossEntropy(), layout, world, seed=5)
    lanes = Lanes(corpus, lanes=16, window=32)
    trainer = Trainer(engine, lanes, TrainConfig(steps=50, lr=3e-3, warmup=10, clip=0.5))
    return [report.loss for report in trainer]


@pytest.mark.long
def test_fifty_steps_on_wikitext_give_one_curve_in_every_layout(wikitext: Path, tmp_path: Path) -> None:
    (corpus,) = prepare_text(wikitext / "valid.txt", tmp_path / "corpus")
    curves: dict[str, list[float]] = {}
    for layout in (
        Layout(),
        Layout(stages=2, chunks=4),
        Layout(replicas=2),
        Layout(replicas=2, stages=2, micro_batches=2, chunks=4),
    ):
        ranks = RankPool(layout.num_ranks)
        curves[str(layout)] = ranks.run(curve, corpus.location, layout)[0]
        ranks.close()
    alone = curves.pop(str(Layout()))
    assert alone[-1] < 0.8 * alone[0]
    for layout_name, losses in curves.items():
        assert losses == pytest.approx(alone, rel=1e-4), layout_name
