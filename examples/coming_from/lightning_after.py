"""The same with lanes: each rank carries the state of its own lanes.

python lightning_after.py [RANKS]    # reads book.txt
"""

import sys
from pathlib import Path

import torch

import stretto
from stretto import data, nn


def train() -> list[float]:
    with stretto.world() as world:
        torch.manual_seed(0)
        model = nn.Stack([nn.Pointwise(torch.nn.Embedding(256, 64)), nn.LSTM(64, 64), nn.Linear(64, 256)])
        layout = stretto.Layout(replicas=world.size)
        engine = stretto.make_engine(model, torch.nn.CrossEntropyLoss(), layout, world)
        windows = data.Lanes(data.Corpus.open("data/book"), lanes=16, window=64)
        trainer = stretto.Trainer(engine, windows, stretto.TrainConfig(lr=3e-3, schedule="constant"))
        return [report.loss for report in trainer]


if __name__ == "__main__":
    if not Path("data/book").exists():
        data.prepare_text(["book.txt"], "data/book")
    losses, *_ = stretto.spawn(train, ranks=int(sys.argv[1]) if sys.argv[1:] else 2)
    for step, loss in enumerate(losses, 1):
        print(f"step {step}  loss {loss:.5f}")
