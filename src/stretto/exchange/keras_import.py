"""from_keras: make a stack from a Keras file, or from the arrays of `get_weights()`."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from stretto.base.errors import ConfigError, DataError
from stretto.base.reason import class_and_reason
from stretto.blocks.block import Block
from stretto.blocks.dropout import Dropout, LockedDropout
from stretto.blocks.pointwise import Pointwise
from stretto.blocks.stack import Stack
from stretto.exchange.imported_layer import ImportedLayer, import_layer, stack_layers
from stretto.exchange.keras_file import Array, KerasLayer, read_keras

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "softmax": lambda: nn.Softmax(dim=-1),
    "tanh": nn.Tanh,
}
# Layers that need no block. Masks are not needed because stretto knows the length of each row.
_IGNORED = ("InputLayer", "Masking")


def from_keras(source: Path | str | Sequence[Array]) -> Stack:
    """Return a stack with the weights of a Keras model. It computes the same outputs as the model in inference mode.

    `source` is a `.keras` file, a `.weights.h5` file, or the arrays that `get_weights()` of a layer or a model returns;
    the last two hold no settings, so Keras's defaults are assumed, and Activation layers are left out. Keras itself is
    not needed. Supported layers are Embedding, LSTM, GRU with `reset_after`, Bidirectional LSTM (not from arrays),
    Dense, TimeDistributed, LayerNormalization (not from `.weights.h5`), Activation and dropout; they must run one after
    the other. Each LSTM and GRU outputs all time steps, even one with `return_sequences=False`.
    """
    if isinstance(source, Path | str):
        layers = read_keras(Path(source))
    else:
        layers = _layers_from_arrays([np.asarray(array) for array in source])
    try:
        imported = [part for layer in layers if layer.kind not in _IGNORED for part in _import_keras_layer(layer)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"the Keras model is incomplete or invalid ({class_and_reason(error)}); save it with Keras 3"
        ) from None
    if not imported:
        raise ConfigError("the Keras model has no layers to import; use a model with an LSTM or GRU")
    return stack_layers(imported)


def _import_keras_layer(layer: KerasLayer) -> list[ImportedLayer]:
    """Return a Keras layer as one imported layer, two for a Dense with an activation, none for a linear Activation."""
    if layer.kind == "Embedding":
        (table,) = _layer_arrays(layer, "", 1, 1)
        return [import_layer(layer.name, "Embedding", {"weight": _tensor(table)})]
    if layer.kind in ("LSTM", "GRU"):
        return [_recurrent(layer)]
    if layer.kind == "Bidirectional":
        return [_bidirectional(layer)]
    if layer.kind == "TimeDistributed":
        inner = layer.config["layer"]
        return _import_keras_layer(
            KerasLayer(layer.name, inner["class_name"], inner["config"], {"": layer.arrays.get("layer", [])})
        )
    if layer.kind == "Dense":
        return _dense(layer)
    if layer.kind == "LayerNormalization":
        return [_layer_norm(layer)]
    if layer.kind == "Activation":
        return _activation(layer)
    if layer.kind in ("Dropout", "SpatialDropout1D"):
        rate = float(layer.config.get("rate", 0))
        block: Block = Dropout(rate) if layer.kind == "Dropout" else LockedDropout(rate)
        return [ImportedLayer(layer.name, [block])]
    raise ConfigError(
        f"from_keras does not support the Keras layer {layer.name} ({layer.kind}); choose from Embedding, LSTM, GRU, "
        "Bidirectional, Dense, LayerNormalization, Activation, Dropout, SpatialDropout1D and TimeDistributed"
    )


def _recurrent(layer: KerasLayer) -> ImportedLayer:
    _check_rnn_config(layer)
    if layer.kind == "LSTM":
        return import_layer(layer.name, "LSTM", _lstm_weights(_layer_arrays(layer, "cell", 2, 3)))
    kernel, recurrent_kernel, *bias = _layer_arrays(layer, "cell", 2, 3)
    # Where there is no config, the bias shows the setting: it is 2-D only with reset_after=True.
    if not layer.config.get("reset_after", True) or any(array.ndim != 2 for array in bias):
        raise ConfigError(
            f"{layer.name} is a GRU with reset_after=False, which torch can't compute; train one with "
            "reset_after=True, Keras's default"
        )
    arrays = {"weight_ih_l0": kernel.T, "weight_hh_l0": recurrent_kernel.T}
    if bias:
        arrays |= {"bias_ih_l0": bias[0][0], "bias_hh_l0": bias[0][1]}
    weights = {name: _tensor(_reorder_gru_gates(array)) for name, array in arrays.items()}
    return import_layer(layer.name, "GRU", weights)


def _bidirectional(layer: KerasLayer) -> ImportedLayer:
    inner = layer.config.get("layer", {"class_name": "LSTM", "config": {}})
    merge_mode = layer.config.get("merge_mode", "concat")
    if inner["class_name"] != "LSTM" or merge_mode != "concat":
        raise ConfigError(
            f"the Keras layer {layer.name} is a Bidirectional {inner['class_name']} with merge_mode={merge_mode!r}; "
            "from_keras supports Bidirectional(LSTM) with merge_mode='concat'"
        )
    _check_rnn_config(KerasLayer(layer.name, "LSTM", inner["config"]))
    forward, backward = (
        _lstm_weights(_layer_arrays(layer, f"{direction}_layer/cell", 2, 3)) for direction in ("forward", "backward")
    )
    weights = {**forward, **{f"{name}_reverse": tensor for name, tensor in backward.items()}}
    return import_layer(layer.name, "LSTM", weights)


def _lstm_weights(arrays: list[Array]) -> dict[str, Tensor]:
    """Return torch's weights. The gates have the same order, and Keras's one bias is the sum of torch's two."""
    kernel, recurrent_kernel, *bias = arrays
    weights = {"weight_ih_l0": _tensor(kernel.T), "weight_hh_l0": _tensor(recurrent_kernel.T)}
    if bias:
        weights |= {"bias_ih_l0": _tensor(bias[0]), "bias_hh_l0": _tensor(np.zeros_like(bias[0]))}
    return weights


def _reorder_gru_gates(array: Array) -> Array:
    """Reorder Keras's gates z r h to torch's r z n."""
    z, r, h = np.split(array, 3)
    return np.concatenate([r, z, h])


def _check_rnn_config(layer: KerasLayer) -> None:
    """Raise ConfigError for settings that torch's LSTM and GRU don't support."""
    required = {"activation": "tanh", "recurrent_activation": "sigmoid", "go_backwards": False}
    for name, value in required.items():
        actual = layer.config.get(name, value)
        if actual != value:
            raise ConfigError(
                f"the Keras layer {layer.name} has {name}={actual!r}, which torch's {layer.kind} can't compute; train "
                f"one with {name}={value!r}"
            )


def _dense(layer: KerasLayer) -> list[ImportedLayer]:
    # A Dense from a .weights.h5 file may be the `layer` inside a TimeDistributed.
    kernel, *bias = _layer_arrays(layer, "layer" if "layer" in layer.arrays else "", 1, 2)
    weights = {"weight": _tensor(kernel.T)} | ({"bias": _tensor(bias[0])} if bias else {})
    return [import_layer(layer.name, "Linear", weights), *_activation(layer)]


def _activation(layer: KerasLayer) -> list[ImportedLayer]:
    name = layer.config.get("activation", "linear")
    if name == "linear":
        return []
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ConfigError(
            f"the Keras layer {layer.name} has activation={name!r}; choose from linear, {', '.join(_ACTIVATIONS)}"
        )
    return [ImportedLayer(f"{layer.name}'s activation", [Pointwise(_ACTIVATIONS[name]())])]


def _layer_norm(layer: KerasLayer) -> ImportedLayer:
    config = layer.config
    is_over_features = config.get("axis", -1) in (-1, [-1], 2, [2])  # of [batch, time, features]
    if not (is_over_features and config.get("center", True) and config.get("scale", True)):
        raise ConfigError(
            f"{layer.name} must normalize over features, with gamma and beta; use axis=-1, scale=True and center=True"
        )
    gamma, beta = _layer_arrays(layer, "", 2, 2)
    weights = {"weight": _tensor(gamma), "bias": _tensor(beta)}
    return import_layer(layer.name, "LayerNorm", weights, epsilon=float(config.get("epsilon", 1e-3)))


def _layers_from_arrays(arrays: list[Array]) -> list[KerasLayer]:
    """Infer layers from the shapes of their arrays; an LSTM's or GRU's two kernels have a column per gate and unit."""
    layers: list[KerasLayer] = []
    remaining = list(arrays)
    while remaining:
        first = remaining.pop(0)
        second = remaining[0] if remaining else None
        name = f"layer {len(layers)}"
        if first.ndim == 1 and second is not None and second.shape == first.shape:
            layers.append(KerasLayer(name, "LayerNormalization", {}, {"": [first, remaining.pop(0)]}))
            continue
        if first.ndim != 2:
            raise ConfigError(f"{name} can't begin with an array of shape {list(first.shape)}; use a .keras file")
        num_columns = first.shape[1]
        kinds = {} if second is None or second.ndim != 2 else {3 * len(second): "GRU", 4 * len(second): "LSTM"}
        if second is not None and num_columns in kinds and second.shape[1] == num_columns:
            rnn_arrays = [first, remaining.pop(0)]
            kind = kinds[num_columns]
            # An LSTM's bias is `[num_columns]`; a GRU's is `[2, num_columns]` with `reset_after`, else `[num_columns]`.
            next_shape = remaining[0].shape if remaining else ()
            if next_shape == (num_columns,) or (kind == "GRU" and next_shape == (2, num_columns)):
                rnn_arrays.append(remaining.pop(0))
            layers.append(KerasLayer(name, kind, {}, {"cell": rnn_arrays}))
        elif second is not None and second.shape == (num_columns,):
            layers.append(KerasLayer(name, "Dense", {}, {"": [first, remaining.pop(0)]}))
        else:
            # A matrix without a bias is taken for an Embedding if it comes first, else for a Dense with use_bias=False.
            layers.append(KerasLayer(name, "Dense" if layers else "Embedding", {}, {"": [first]}))
    return layers


def _layer_arrays(layer: KerasLayer, path: str, min_count: int, max_count: int) -> list[Array]:
    """Return the arrays of a sublayer ("" for the layer itself); raise ConfigError for too few or too many."""
    arrays = layer.arrays.get(path, [])
    if not min_count <= len(arrays) <= max_count:
        counts = " or ".join(map(str, range(min_count, max_count + 1)))
        raise ConfigError(
            f"the number of weight arrays of {layer.name} must be {counts}, not {len(arrays)}; save a built Keras model"
        )
    return arrays


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
