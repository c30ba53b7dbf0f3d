"""Train on arrays in memory: X [rows, time, channels] -> y [rows, values], with torch's mean squared error.

python examples/09_arrays.py
torchrun --nproc-per-node 2 examples/09_arrays.py
"""

import json
import time

import numpy as np
import torch

import stretto
from stretto import nn
from stretto.data import Batches, from_arrays

started, draw = time.perf_counter(), np.random.default_rng(1)
X = draw.normal(size=(1000, 20, 10))
y = X.mean(axis=1) @ draw.normal(size=(10, 5))
train, valid = (Batches(from_arrays(X[part], y[part]), max_rows=50) for part in (slice(800), slice(800, None)))

with stretto.world() as world:
    model = nn.Stack([nn.LSTM(10, 64), nn.Linear(64, 5)])
    layout = stretto.Layout(replicas=world.size)
    engine = stretto.make_engine(model, torch.nn.MSELoss(), layout, world, seed=1)
    for report in stretto.Trainer(engine, train, stretto.TrainConfig(epochs=30, lr=1e-2)):
        if world.is_rank_zero and report.step % 160 == 0:
            print(f"step {report.step}  loss {report.loss:.4f}")

    loss = stretto.evaluate(engine, valid).loss
    predictions = stretto.serve.predict_arrays(engine.stack, X[800:])
    assert np.isclose(np.square(predictions - y[800:]).mean(), loss)
    if world.is_rank_zero:
        print(json.dumps({"loss": loss, "ranks": world.size, "seconds": time.perf_counter() - started}))
