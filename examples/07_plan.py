"""Measure the model, try the best layouts on the available ranks, and train in the fastest.

torchrun --nproc-per-node 2 examples/07_plan.py
"""

import torch

import stretto
from stretto import nn
from stretto.data import Corpus, Lanes

with stretto.world() as world:
    train = Lanes(Corpus.open("data/python/train"), lanes=16, window=64)
    with torch.device("meta"):
        model = nn.Stack(
            [
                nn.Embedding(256, 128),
                nn.LSTM(128, 128),
                nn.LSTM(128, 128),
                nn.Linear(128, 256),
            ]
        )
    loss = nn.CrossEntropy()
    layout = stretto.choose_layout(model, loss, train, world=world, optimizer=torch.optim.AdamW)
    if world.is_rank_zero:
        print(f"chosen: {layout}")

    engine = stretto.make_engine(model, loss, layout, world, seed=1)
    reports = list(stretto.Trainer(engine, train, stretto.TrainConfig(steps=60, lr=4e-3)))
    if world.is_rank_zero:
        print(f"loss {reports[-1].loss:.3f} after {reports[-1].step} steps")
