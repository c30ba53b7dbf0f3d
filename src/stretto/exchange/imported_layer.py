"""ImportedLayer: a torch or Keras layer as blocks, one per layer of an LSTM or GRU, so that stages can split it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.base.reason import last_line
from stretto.blocks.bidirectional import BidirectionalGRU, BidirectionalLSTM
from stretto.blocks.block import Block
from stretto.blocks.dropout import Dropout
from stretto.blocks.pointwise import Embedding, LayerNorm, Linear
from stretto.blocks.recurrent import GRU, LSTM
from stretto.blocks.residual import Residual
from stretto.blocks.stack import Stack

LayerKind = Literal["Embedding", "LSTM", "GRU", "Linear", "LayerNorm"]
Weights = Mapping[str, Tensor]
"""Weights of a layer or a model, named as in a torch state dict."""


@dataclass(frozen=True)
class ImportedLayer:
    """The blocks of one layer (several for a multi-layer LSTM or GRU), and its numbers of input and output features."""

    name: str
    blocks: list[Block]
    in_features: int | None = None  # None: not checked
    out_features: int | None = None  # None: the same as the inputs


def stack_layers(layers: Sequence[ImportedLayer]) -> Stack:
    """Return one stack of all blocks; raise ConfigError if a layer's input and the previous output differ in size."""
    previous_features: int | None = None
    previous = ""
    for layer in layers:
        if previous_features is not None and layer.in_features not in (None, previous_features):
            raise ConfigError(
                f"{layer.name} takes {layer.in_features} features, but the layer before it, {previous}, outputs "
                f"{previous_features}; give the layers in the order in which they run"
            )
        if layer.out_features is not None:
            previous_features, previous = layer.out_features, layer.name
    return Stack([block for layer in layers for block in layer.blocks])


def import_layer(
    name: str, kind: LayerKind, weights: Weights, *, dropout: float = 0.0, epsilon: float = 1e-5
) -> ImportedLayer:
    """Return a layer's blocks with copies of its weights; `dropout` is applied between the layers of an LSTM or GRU."""
    try:
        with torch.device("meta"):
            if kind in ("LSTM", "GRU"):
                return _recurrent(name, kind, weights, dropout)
            if kind == "LayerNorm":
                num_features = len(weights["weight"])
                norm = LayerNorm(num_features)
                norm.module.eps = epsilon  # type: ignore[assignment]
                return ImportedLayer(name, [_with_weights(norm, "module", weights)], num_features, num_features)
            if kind == "Embedding":
                num_tokens, out_features = weights["weight"].shape
                embedding = _with_weights(Embedding(num_tokens, out_features), "module", weights)
                return ImportedLayer(name, [embedding], None, out_features)
            out_features, in_features = weights["weight"].shape
            linear = _with_weights(Linear(in_features, out_features, bias="bias" in weights), "module", weights)
            return ImportedLayer(name, [linear], in_features, out_features)
    except (KeyError, ValueError, RuntimeError) as error:
        # Torch's error about a state dict has one line per problem; the last is enough here.
        reason = f"no {error}" if isinstance(error, KeyError) else last_line(error)
        raise ConfigError(
            f"the weights of {name} don't match torch's {kind} ({reason}); give all weights of the layer, unchanged"
        ) from None


def residual(layer: ImportedLayer) -> ImportedLayer:
    """Return the layer with a skip connection around it."""
    inner = layer.blocks[0] if len(layer.blocks) == 1 else Stack(layer.blocks)
    return ImportedLayer(layer.name, [Residual(inner)], layer.in_features, layer.out_features)


def _recurrent(name: str, kind: str, weights: Weights, dropout: float) -> ImportedLayer:
    # Each layer's weights, renamed as if it were the only one: `weight_ih_l2_reverse` -> `weight_ih_l0_reverse`.
    layers: dict[int, dict[str, Tensor]] = {}
    for weight_name, tensor in weights.items():
        match = re.fullmatch(r"(\w+_l)(\d+)(_reverse)?", weight_name)
        if match is None:
            raise ValueError(f"unexpected weight {weight_name}")
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
    gate_rows, out_features = weights["weight_hh_l0"].shape
    projection = weights.get("weight_hr_l0")
    has_bias = "bias_ih_l0" in weights
    is_bidirectional = "weight_ih_l0_reverse" in weights
    if is_bidirectional and projection is not None:
        raise ConfigError(
            f"{name} is a bidirectional LSTM with a projection, which stretto does not support; use a plain "
            "bidirectional LSTM"
        )
    if is_bidirectional:
        block_class = BidirectionalGRU if kind == "GRU" else BidirectionalLSTM
        return _with_weights(block_class(in_features, out_features, bias=has_bias), "cell", weights)
    if kind == "GRU":
        return _with_weights(GRU(in_features, out_features, bias=has_bias), "cell", weights)
    proj_size = 0 if projection is None else out_features
    return _with_weights(LSTM(in_features, gate_rows // 4, proj_size=proj_size, bias=has_bias), "cell", weights)


def _with_weights(block: Block, attribute: str, weights: Weights) -> Block:
    """Return the block, created on the meta device, with copies of the weights in the module at `attribute`."""
    # Weights on the meta device have no values yet: `initialize` draws them later, as for any other model.
    copies = {name: (weight if weight.is_meta else weight.cpu()).detach().clone() for name, weight in weights.items()}
    block.load_state_dict({f"{attribute}.{name}": weight for name, weight in copies.items()}, assign=True)
    return block
