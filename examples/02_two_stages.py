"""The same model split over two ranks, by layers and by time; the losses are those of one rank.

torchrun --nproc-per-node 2 examples/02_two_stages.py
"""

import torch

import stretto
from stretto import nn
from stretto.data import Corpus, Lanes

layout = stretto.Layout(stages=2, chunks=4)

with stretto.world(layout.num_ranks) as world:  # raises an error if the job has another number of ranks
    train = Lanes(Corpus.open("data/python/train"), lanes=16, window=64)
    with torch.device("meta"):  # no memory yet: each rank allocates only its own stage
        model = nn.Stack(
            [
                nn.Embedding(256, 128),
                nn.LSTM(128, 128),
                nn.LockedDropout(0.1),
                nn.LSTM(128, 128),
                nn.Linear(128, 256),
            ]
        )
    engine = stretto.make_engine(model, nn.CrossEntropy(), layout, world, seed=1)
    trainer = stretto.Trainer(engine, train, stretto.TrainConfig(steps=100, lr=4e-3))

    for report in trainer:
        if world.is_rank_zero and report.step % 20 == 0:
            print(f"step {report.step}  loss {report.loss:.3f}  {report.targets_per_second:,.0f} tokens/s")
