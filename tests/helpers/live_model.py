"""A model that live ranks train, with what can go wrong when ranks change, and its losses on one device."""

import numpy as np
import torch

from stretto import Layout, TrainConfig, Trainer, World, make_engine
from stretto.data import Batches, Corpus, Lanes, from_arrays
from stretto.nn import LSTM, CrossEntropy, Dropout, Embedding, Linear, SquaredError, Stack

STEPS = 60


def make_trainer(world: World, layout: Layout, corpus: Corpus | None, steps: int = STEPS) -> Trainer:
    """A model with dropout in float64, on lanes of text, or on sequences of different lengths."""
    # Small spikes are undone, too: what is needed for that must come along when the ranks change.
    config = TrainConfig(steps=steps, lr=0.01, clip=0.5, average="ema", spike=1.02, spike_losses=4, spike_rewind=3)
    if corpus is not None:
        model = Stack([Embedding(256, 12), LSTM(12, 12), Dropout(0.1), LSTM(12, 12), Linear(12, 256)]).double()
        windows = Lanes(corpus, lanes=7, window=9)
        return Trainer(make_engine(model, CrossEntropy(), layout, world, seed=3), windows, config, seed=5)
    model = Stack([LSTM(3, 8), Dropout(0.1), LSTM(8, 8), Linear(8, 1)]).double()
    random_numbers = np.random.default_rng(1)
    inputs = [random_numbers.standard_normal((length, 3)) for length in random_numbers.integers(2, 20, size=50)]
    items = from_arrays(inputs, [values[:, :1] for values in inputs])
    return Trainer(
        make_engine(model, SquaredError(), layout, world, seed=3), Batches(items, max_rows=7), config, seed=5
    )


def uninterrupted(corpus: Corpus | None, steps: int = STEPS) -> dict[int, float]:
    """The losses of one device, by step."""
    trainer = make_trainer(World(0, 1, torch.device("cpu")), Layout(), corpus, steps)
    reports = list(trainer)
    assert any(report.rewound_to is not None for report in reports), "there are spikes"
    return {report.step: report.loss for report in reports}
