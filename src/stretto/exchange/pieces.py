"""Pieces: layers as others keep them, made into blocks: one for each layer, so that stages can be cut between them."""

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

Kind = Literal["Embedding", "LSTM", "GRU", "Linear", "LayerNorm"]
Weights = Mapping[str, Tensor]
"""A layer's weights by the names that torch's own module has for them."""


@dataclass(frozen=True)
class Piece:
    """The blocks of one layer, or of a few fused ones, and how many features go in and come out."""

    name: str
    blocks: list[Block]
    takes: int | None = None  # none: any
    gives: int | None = None  # none: as many as went in


def join(pieces: Sequence[Piece]) -> Stack:
    """Return a stack of pieces that fit together."""
    width: int | None = None
    before = ""
    for piece in pieces:
        if width is not None and piece.takes not in (None, width):
            raise ConfigError(
                f"{piece.name} takes {piece.takes} features, but {before}, before it, gives {width}; give the layers "
                "in the order in which they run"
            )
        if piece.gives is not None:
            width, before = piece.gives, piece.name
    return Stack([block for piece in pieces for block in piece.blocks])


def make_piece(name: str, kind: Kind, weights: Weights, *, dropout: float = 0.0, epsilon: float = 1e-5) -> Piece:
    """Return the blocks of a layer with copies of its weights; `dropout` goes between fused layers."""
    try:
        return _piece(name, kind, weights, dropout, epsilon)
    except (KeyError, ValueError, RuntimeError) as error:
        # Torch's own sentence about a state dict ends with the first weight that doesn't fit.
        reason = str(error).strip().splitlines()[-1].strip()
        raise ConfigError(f"{name} is no whole {kind} ({reason}); give all weights of a layer, as they are") from None


def _piece(name: str, kind: Kind, weights: Weights, dropout: float, epsilon: float) -> Piece:
    if kind in ("LSTM", "GRU"):
        return _recurrent(name, kind, weights, dropout)
    first, second = weights["weight"].shape if kind != "LayerNorm" else (len(weights["weight"]),) * 2
    has_bias = "bias" in weights
    with torch.device("meta"):
        if kind == "Embedding":
            return Piece(name, [_filled(Embedding(first, second), "module", weights)], None, second)
        if kind == "Linear":
            return Piece(name, [_filled(Linear(second, first, bias=has_bias), "module", weights)], second, first)
        norm = LayerNorm(first)
        norm.module.eps = epsilon  # type: ignore[assignment]
        return Piece(name, [_filled(norm, "module", weights)], first, first)


def residual(piece: Piece) -> Piece:
    """Return a piece whose input is added to its output."""
    inner = piece.blocks[0] if len(piece.blocks) == 1 else Stack(piece.blocks)
    return Piece(piece.name, [Residual(inner)], piece.takes, piece.gives)


def _recurrent(name: str, kind: str, weights: Weights, dropout: float) -> Piece:
    layers: dict[int, dict[str, Tensor]] = {}
    for full, tensor in weights.items():
        found = re.fullmatch(r"(\w+_l)(\d+)(_reverse)?", full)
        if found is None:
            raise ValueError(f"it has a weight {full}")
        layers.setdefault(int(found[2]), {})[f"{found[1]}0{found[3] or ''}"] = tensor
    blocks: list[Block] = []
    for index in range(len(layers)):
        if blocks and dropout:
            blocks.append(Dropout(dropout))
        blocks.append(_layer(name, kind, layers[index]))
    takes = layers[0]["weight_ih_l0"].shape[1]
    num_directions = 1 + ("weight_ih_l0_reverse" in layers[0])
    return Piece(name, blocks, takes, num_directions * layers[0]["weight_hh_l0"].shape[1])


def _layer(name: str, kind: str, weights: dict[str, Tensor]) -> Block:
    takes = weights["weight_ih_l0"].shape[1]
    gates, gives = weights["weight_hh_l0"].shape
    projection = weights.get("weight_hr_l0")
    has_bias = "bias_ih_l0" in weights
    is_bidirectional = "weight_ih_l0_reverse" in weights
    if is_bidirectional and (kind == "GRU" or projection is not None):
        what = "a bidirectional GRU" if kind == "GRU" else "a bidirectional LSTM with a projection"
        raise ConfigError(f"{name} is {what}, which stretto has no block for; use a bidirectional LSTM without one")
    with torch.device("meta"):
        if is_bidirectional:
            return _filled(BidirectionalLSTM(takes, gives, bias=has_bias), "cell", weights)
        if kind == "GRU":
            return _filled(GRU(takes, gives, bias=has_bias), "cell", weights)
        size = 0 if projection is None else gives
        return _filled(LSTM(takes, gates // 4, projection_size=size, bias=has_bias), "cell", weights)


def _filled(block: Block, inner: str, weights: Weights) -> Block:
    """A block made on the meta device, with copies of weights."""
    named = {f"{inner}.{name}": tensor.detach().cpu().clone() for name, tensor in weights.items()}
    block.load_state_dict(named, assign=True)
    return block
