"""Arrays, `fit` with early stopping, `predict`. Needs keras.

python keras_before.py    # reads series.npz
"""

import keras
import numpy as np

series = np.load("series.npz")
(x, x_valid), (y, y_valid) = ((array[:192], array[192:]) for array in (series["x"], series["y"]))

keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((None, 8)), keras.layers.LSTM(32), keras.layers.Dense(3)])
model.compile(keras.optimizers.Adam(1e-2, global_clipnorm=1.0), "mse")
stop = keras.callbacks.EarlyStopping(patience=4, restore_best_weights=True)
model.fit(x, y, batch_size=32, epochs=40, validation_data=(x_valid, y_valid), callbacks=[stop], verbose=0)

loss = model.evaluate(x_valid, y_valid, verbose=0)
predictions = model.predict(x_valid, verbose=0)
print(f"loss {loss:.5f}  predictions {predictions.shape}")
