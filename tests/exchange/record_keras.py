"""Records the outputs of Keras: `PYTHON tests/exchange/record_keras.py FILE` in a Python that has Keras 3.

Small models with weights drawn by seed, their files, inputs and outputs, as JSON.
"""

import base64
import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers


def make_models() -> dict[str, Any]:
    """The models by name, each with different layers."""
    tokens, channels = keras.Input((None,), dtype="int32"), keras.Input((None, 3))
    x = layers.LSTM(4, return_sequences=True, use_bias=False)(channels)
    x = layers.GRU(5, return_sequences=True)(x)
    x = layers.LayerNormalization()(x)
    return {
        "words": keras.Sequential(
            [
                tokens,
                layers.Embedding(11, 6, mask_zero=False),
                layers.LSTM(5, return_sequences=True),
                layers.Dropout(0.5),
                layers.LSTM(4, return_sequences=True),
                layers.Dense(7, activation="softmax"),
            ]
        ),
        "functional": keras.Model(channels, layers.Dense(2)(x)),
        "both": keras.Sequential(
            [
                keras.Input((None, 3)),
                layers.Bidirectional(layers.LSTM(4, return_sequences=True)),
                layers.TimeDistributed(layers.Dense(3, activation="tanh")),
                layers.Dense(2, use_bias=False),
            ]
        ),
        "gru": keras.Sequential([keras.Input((None, 3)), layers.GRU(4, return_sequences=True), layers.Dense(2)]),
    }


def record(name: str, model: Any, folder: Path) -> dict[str, object]:  # noqa: ANN401 - Keras has no types
    """The files, weights, inputs and outputs of one model."""
    rng = np.random.default_rng(len(name))
    # Biases too: they start at 0 or 1, which would hide a wrong order.
    model.set_weights([rng.normal(scale=0.7, size=own.shape).astype(np.float32) for own in model.get_weights()])
    x = rng.integers(11, size=(3, 9)) if name == "words" else rng.normal(size=(3, 9, 3)).astype(np.float32)
    model.save(folder / f"{name}.keras")
    model.save_weights(folder / f"{name}.weights.h5")
    files = {"keras": pack(folder / f"{name}.keras")}
    if name in ("words", "gru"):
        # For the other models, the order of the layers is not in this file.
        files["h5"] = pack(folder / f"{name}.weights.h5")
    arrays = [short(own) for own in model.get_weights()]
    return {"inputs": short(x), "outputs": short(model.predict(x, verbose=0)), "arrays": arrays, **files}


def short(array: Any) -> Any:  # noqa: ANN401 - nested lists
    """An array as lists, with as many digits as float32 has."""
    return json.loads(json.dumps(array.tolist()), parse_float=lambda text: float(f"{float(text):.9g}"))


def pack(path: Path) -> str:
    """A file as text."""
    return base64.b64encode(zlib.compress(path.read_bytes(), 9)).decode()


def main(out: Path) -> None:
    """Write the record."""
    with tempfile.TemporaryDirectory() as folder:
        recorded = {name: record(name, model, Path(folder)) for name, model in make_models().items()}
    out.write_text(json.dumps({"version": keras.__version__, "models": recorded}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
