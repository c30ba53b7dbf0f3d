"""ImportedLayer: a layer of another framework as blocks, one per layer, so that stages can be cut between them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.blocks.bidirectional import BidirectionalLSTM
from stretto.blocks.block import Block
from stretto.blocks.dropout import Dropout
from stretto.blocks.pointwise import Embedding, LayerNorm, Linear
from stretto.blocks.recurrent import GRU, LSTM
from stretto.blocks.residual import Residual
from stretto.blocks.stack import Stack

LayerKind = Literal["Embedding", "LSTM", "GRU", "Linear", "LayerNorm"]
Weights = Mapping[str, Tensor]
"""A layer's weights by their names in torch's module."""


@dataclass(frozen=True)
class ImportedLayer:
    """The blocks of one layer or of a few fused layers, and their numbers of input and output features."""

    name: str
    blocks: list[Block]
    in_features: int | None = None  # None: any
    out_features: int | None = None  # None: the same as the inputs


def stack_layers(layers: Sequence[ImportedLayer]) -> Stack:
    """Return a stack of layers; raise ConfigError if their widths don't match."""
    width: int | None = None
    before = ""
    for layer in layers:
        if width is not None and layer.in_features not in (None, width):
            raise ConfigError(
                f"{layer.name} takes {layer.in_features} features, but {before}, before it, outputs {width}; give the "
                "layers in the order in which they run"
            )
        if layer.out_features is not None:
            width, before = layer.out_features, layer.name
    return Stack([block for layer in layers for block in layer.blocks])


def import_layer(
    name: str, kind: LayerKind, weights: Weights, *, dropout: float = 0.0, epsilon: float = 1e-5
) -> ImportedLayer:
    """Return the blocks of a layer with copies of its weights; `dropout` is inserted between fused layers."""
    try:
        return _import_layer(name, kind, weights, dropout, epsilon)
    except (KeyError, ValueError, RuntimeError) as error:
        # The last line of torch's error about a state dict names the first weight that does not match.
        reason = str(error).strip().splitlines()[-1].strip()
        raise ConfigError(
            f"{name} is not a complete {kind} ({reason}); give all weights of a layer, as they are"
        ) from None


def _import_layer(name: str, kind: LayerKind, weights: Weights, dropout: float, epsilon: float) -> ImportedLayer:
    if kind in ("LSTM", "GRU"):
        return _recurrent(name, kind, weights, dropout)
    first, second = weights["weight"].shape if kind != "LayerNorm" else (len(weights["weight"]),) * 2
    has_bias = "bias" in weights
    with torch.device("meta"):
        if kind == "Embedding":
            return ImportedLayer(name, [_with_weights(Embedding(first, second), "module", weights)], None, second)
        if kind == "Linear":
            return ImportedLayer(
                name, [_with_weights(Linear(second, first, bias=has_bias), "module", weights)], second, first
            )
        norm = LayerNorm(first)
        norm.module.eps = epsilon  # type: ignore[assignment]
        return ImportedLayer(name, [_with_weights(norm, "module", weights)], first, first)


def residual(layer: ImportedLayer) -> ImportedLayer:
    """Return the layer with a skip connection around it."""
    inner = layer.blocks[0] if len(layer.blocks) == 1 else Stack(layer.blocks)
    return ImportedLayer(layer.name, [Residual(inner)], layer.in_features, layer.out_features)


def _recurrent(name: str, kind: str, weights: Weights, dropout: float) -> ImportedLayer:
    layers: dict[int, dict[str, Tensor]] = {}
    for full, tensor in weights.items():
        match = re.fullmatch(r"(\w+_l)(\d+)(_reverse)?", full)
        if match is None:
            raise ValueError(f"unexpected weight {full}")
        layers.setdefault(int(match[2]), {})[f"{match[1]}0{match[3] or ''}"] = tensor
    blocks: list[Block] = []
    for index in range(len(layers)):
        if blocks and dropout:
            blocks.append(Dropout(dropout))
        blocks.append(_recurrent_block(name, kind, layers[index]))
    in_features = layers[0]["weight_ih_l0"].shape[1]
    num_directions = 1 + ("weight_ih_l0_reverse" in layers[0])
    return ImportedLayer(name, blocks, in_features, num_directions * layers[0]["weight_hh_l0"].shape[1])


def _recurrent_block(name: str, kind: str, weights: dict[str, Tensor]) -> Block:
    in_features = weights["weight_ih_l0"].shape[1]
    gates, out_features = weights["weight_hh_l0"].shape
    projection = weights.get("weight_hr_l0")
    has_bias = "bias_ih_l0" in weights
    is_bidirectional = "weight_ih_l0_reverse" in weights
    if is_bidirectional and (kind == "GRU" or projection is not None):
        actual = "a bidirectional GRU" if kind == "GRU" else "a bidirectional LSTM with a projection"
        raise ConfigError(f"{name} is {actual}, which stretto does not support; use a bidirectional LSTM without one")
    with torch.device("meta"):
        if is_bidirectional:
            return _with_weights(BidirectionalLSTM(in_features, out_features, bias=has_bias), "cell", weights)
        if kind == "GRU":
            return _with_weights(GRU(in_features, out_features, bias=has_bias), "cell", weights)
        size = 0 if projection is None else out_features
        return _with_weights(LSTM(in_features, gates // 4, proj_size=size, bias=has_bias), "cell", weights)


def _with_weights(block: Block, inner: str, weights: Weights) -> Block:
    """Fill a block that was created on the meta device with copies of weights."""
    named = {f"{inner}.{name}": tensor.detach().cpu().clone() for name, tensor in weights.items()}
    block.load_state_dict(named, assign=True)
    return block
