"""The same on two ranks.

python keras_after.py    # reads series.npz, writes checkpoints to keras/
"""

from typing import Any

import numpy as np
import torch

import stretto
from stretto import data, nn


def fit(x: Any, y: Any, x_valid: Any, y_valid: Any) -> tuple[float, Any]:  # noqa: ANN401
    with stretto.world() as world, stretto.CheckpointManager("keras", world, keep_best=True) as checkpoints:
        model = nn.Stack([nn.LSTM(8, 32), nn.Linear(32, 3)])
        engine = stretto.make_engine(model, torch.nn.MSELoss(), stretto.Layout(replicas=world.size), world, seed=1)
        train, valid = (data.Batches(data.from_arrays(*rows), max_rows=32) for rows in ((x, y), (x_valid, y_valid)))
        config = stretto.TrainConfig(optimizer="adam", lr=1e-2, schedule="constant", epochs=40, patience=4)
        trainer = stretto.Trainer(engine, train, config)
        checkpoints.start(resume="never")
        for report in trainer:  # ends after four evaluations in a row without a lower loss
            if report.step % 6 == 0:  # an epoch
                loss = stretto.evaluate(engine, valid).loss
                trainer.record_score(loss)
                checkpoints.record_score(report.step, loss)
                checkpoints.save(trainer.snapshot(), wait=True)
        trainer.restore(stretto.checkpoint.find_checkpoint("keras@best"))
        return stretto.evaluate(engine, valid).loss, stretto.serve.predict_arrays(model, x_valid)


if __name__ == "__main__":
    series = np.load("series.npz")
    (x, x_valid), (y, y_valid) = ((array[:192], array[192:]) for array in (series["x"], series["y"]))
    loss, predictions = stretto.spawn(fit, x, y, x_valid, y_valid, ranks=2)[0]
    print(f"loss {loss:.5f}  predictions {predictions.shape}")
