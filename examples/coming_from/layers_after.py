"""The same in two stages that work at the same time, on different chunks of time.

python layers_after.py    # reads series.npz
"""

import numpy as np
import torch

import stretto
from stretto import data, nn


def train() -> list[float]:
    layout = stretto.Layout(stages=2, chunks=8)
    with stretto.world(layout.num_ranks) as world:
        torch.manual_seed(0)
        model = nn.Stack([nn.LSTM(8, 64), nn.LSTM(64, 64), nn.Linear(64, 3)])
        engine = stretto.make_engine(model, torch.nn.MSELoss(), layout, world)
        series = np.load("series.npz")
        batches = data.Batches(data.from_arrays(series["x"], series["y"]), max_rows=256)
        trainer = stretto.Trainer(engine, batches, stretto.TrainConfig(epochs=10, lr=3e-3, schedule="constant"))
        return [report.loss for report in trainer]


if __name__ == "__main__":
    for step, loss in enumerate(stretto.spawn(train, ranks=2)[0], 1):
        print(f"step {step}  loss {loss:.5f}")
