"""The same model on the same texts with stretto: the same losses on one rank or several.

python ddp_after.py    # reads texts.jsonl, writes data/texts
torchrun --nproc-per-node 2 ddp_after.py
"""

from pathlib import Path

import torch

import stretto
from stretto import nn
from stretto.data import Batches, NextTokenItems, Sequences, prepare_sequences

with stretto.world() as world:
    layout = stretto.Layout(replicas=world.size)
    with torch.device("meta"):
        model = nn.Stack(
            [
                nn.Embedding(256, 64),
                nn.LSTM(64, 64),
                nn.LSTM(64, 64),
                nn.Linear(64, 256),
            ]
        )
    engine = stretto.make_engine(model, nn.CrossEntropy(), layout, world, seed=1)

    if world.is_rank_zero and not Path("data/texts").exists():
        prepare_sequences("texts.jsonl", "data/texts")
    world.barrier()  # wait until rank 0 has written the data

    texts = NextTokenItems(Sequences.open("data/texts"))
    batches = Batches(texts, budget=2048)
    for report in stretto.Trainer(engine, batches, stretto.TrainConfig(epochs=2, lr=3e-3)):
        if world.is_rank_zero and report.step % 5 == 0:
            print(f"step {report.step}  loss {report.loss:.4f}  gradient norm {report.gradient_norm:.4f}")
