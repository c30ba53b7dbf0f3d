"""The same model on the same texts with stretto: on one rank or on several, the same losses.

python ddp_after.py    # reads texts.jsonl, writes data/texts
torchrun --nproc-per-node 2 ddp_after.py
"""

from pathlib import Path

import torch

import stretto

with stretto.world() as world:
    layout = stretto.Layout(replicas=world.size)
    with torch.device("meta"):
        model = stretto.nn.Stack(
            [
                stretto.nn.Embedding(256, 64),
                stretto.nn.LSTM(64, 64),
                stretto.nn.LSTM(64, 64),
                stretto.nn.Linear(64, 256),
            ]
        )
    engine = stretto.make_engine(model, stretto.nn.TokenLoss(), layout, world, seed=1)

    if world.is_rank_zero and not Path("data/texts").exists():
        stretto.data.prepare_sequences("texts.jsonl", "data/texts")
    world.barrier()  # all wait here for the first

    texts = stretto.data.NextTokenItems(stretto.data.Sequences.open("data/texts"))
    data = stretto.data.Batches(texts, budget=2048).share(engine.replica, layout.replicas)
    for report in stretto.Trainer(engine, data, stretto.TrainConfig(epochs=2, lr=3e-3)):
        if world.is_rank_zero and report.step % 5 == 0:
            print(f"step {report.step}  loss {report.loss:.4f}  gradient norm {report.gradient_norm:.4f}")
