"""Train on arrays: X [rows, time, channels] -> y [rows, values], on two ranks that are started from Python.

python examples/09_arrays.py
"""

import json
import time
from typing import Any

import numpy as np
import torch

import stretto
from stretto import data, nn


def train(x: Any, y: Any) -> tuple[float, Any, int]:  # noqa: ANN401
    train, valid = (data.Batches(data.from_arrays(x[i:j], y[i:j]), max_rows=50) for i, j in ((0, 800), (800, 1000)))
    with stretto.world() as world, stretto.CheckpointManager("runs/arrays", world, keep_best=True) as checkpoints:
        model = nn.Stack([nn.LSTM(10, 32), nn.Linear(32, 5)])
        engine = stretto.make_engine(model, torch.nn.MSELoss(), stretto.Layout(replicas=world.size), world, seed=1)
        trainer = stretto.Trainer(engine, train, stretto.TrainConfig(epochs=40, lr=1e-2, patience=4))
        checkpoints.start(resume="never")
        for report in trainer:  # ends when four evaluations in a row have not improved
            if report.step % 16 == 0:
                loss = stretto.evaluate(engine, valid).loss
                trainer.record_score(loss)
                checkpoints.record_score(report.step, loss)
                checkpoints.save(trainer.snapshot(), wait=True)
        trainer.restore(stretto.checkpoint.find_checkpoint("runs/arrays@best"))
        complete = stretto.train.gather_model(engine, model)  # needed for layouts with several stages
        return stretto.evaluate(engine, valid).loss, stretto.serve.predict_arrays(complete, x[800:]), world.size


if __name__ == "__main__":
    started, draw = time.perf_counter(), np.random.default_rng(1)
    X = draw.normal(size=(1000, 20, 10))
    y = X.mean(axis=1) @ draw.normal(size=(10, 5))
    loss, predictions, ranks = stretto.spawn(train, X, y, ranks=2)[0]
    assert np.isclose(np.square(predictions - y[800:]).mean(), loss)
    print(json.dumps({"loss": loss, "ranks": ranks, "seconds": time.perf_counter() - started}))
