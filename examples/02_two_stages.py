"""The same model spread over two ranks, cut in layers and in time; the same numbers as on one.

torchrun --nproc-per-node 2 examples/02_two_stages.py
"""

import torch

import stretto

layout = stretto.Layout(stages=2, chunks=4)

with stretto.world(layout.num_ranks) as world:
    train = stretto.data.Lanes(stretto.data.Corpus.open("data/python/train"), lanes=16, window=64)
    with torch.device("meta"):  # described everywhere, made only where it is needed
        model = stretto.nn.Stack(
            [
                stretto.nn.Embedding(256, 128),
                stretto.nn.LSTM(128, 128),
                stretto.nn.LockedDropout(0.1),
                stretto.nn.LSTM(128, 128),
                stretto.nn.Linear(128, 256),
            ]
        )
    engine = stretto.make_engine(model, stretto.nn.TokenLoss(), layout, world, seed=1)
    share = train.share(engine.mesh.replica, layout.replicas)

    for report in stretto.Trainer(engine, share, stretto.TrainConfig(steps=100, lr=4e-3)):
        if world.is_rank_zero and report.step % 20 == 0:
            print(f"step {report.step}  loss {report.loss:.3f}  {report.tokens_per_second:,.0f} tokens/s")
