"""Measure, plan, and train in the layout that is predicted to be fastest on the ranks there are.

torchrun --nproc-per-node 2 examples/07_plan.py
"""

import torch

import stretto

with stretto.world() as world:
    train = stretto.data.Lanes(stretto.data.Corpus.open("data/python/train"), lanes=16, window=64)
    with torch.device("meta"):
        model = stretto.nn.Stack(
            [
                stretto.nn.Embedding(256, 128),
                stretto.nn.LSTM(128, 128),
                stretto.nn.LSTM(128, 128),
                stretto.nn.Linear(128, 256),
            ]
        )
    loss = stretto.nn.TokenLoss()
    layout = stretto.choose_layout(model, loss, train, world=world, optimizer=torch.optim.AdamW)
    if world.is_rank_zero:
        print(f"chosen: {layout}")

    engine = stretto.make_engine(model, loss, layout, world, seed=1)
    share = train.share(engine.mesh.replica, layout.replicas, layout.micro_batches)
    reports = list(stretto.Trainer(engine, share, stretto.TrainConfig(steps=60, lr=4e-3)))
    if world.is_rank_zero:
        print(f"loss {reports[-1].loss:.3f} after {reports[-1].step} steps")
