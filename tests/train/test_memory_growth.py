"""The memory of a rank does not grow with the number of steps."""

from pathlib import Path

import pytest

from helpers.rank_pool import RankPool
from stretto import Layout, TrainConfig, Trainer, World, make_engine
from stretto.data import Corpus, Lanes
from stretto.nn import LSTM, CrossEntropy, Dropout, Embedding, Linear, Stack


def resident_megabytes() -> float:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


def train(world: World, corpus: Corpus) -> list[float]:
    """Return the resident memory after some steps, and after more."""
    model = Stack([Embedding(256, 64), LSTM(64, 64), Dropout(0.1), LSTM(64, 64), Linear(64, 256)])
    engine = make_engine(model, CrossEntropy(), Layout(replicas=2), world, seed=1)
    trainer = Trainer(engine, Lanes(corpus, lanes=32, window=64), TrainConfig(steps=220))
    return [resident_megabytes() for report in trainer if report.step in (60, 220)]


@pytest.mark.long
@pytest.mark.short
def test_steps_of_replicas_don_t_take_more_and_more_memory(byte_corpus: Corpus) -> None:
    """torch's record of collectives made it grow by 0.5 MB per step."""
    pool = RankPool(2)  # new processes
    growth = [last - first for first, last in pool.run(train, byte_corpus)]
    pool.close()
    assert max(growth) < 20, growth
