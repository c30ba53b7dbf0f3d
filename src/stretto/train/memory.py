"""Memory: what a trainer's step leaves in tensors, as pieces that any other layout can take up.

weights.<name>             by absolute names, as are all below
optimizer.<name>.<key>     torch's own state of each weight
lanes.<block>.<number>     a block's state, its rows the lanes of all replicas
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stretto.base.errors import DataError
from stretto.base.state import State
from stretto.base.window import Rows
from stretto.blocks.stack import Stack
from stretto.checkpoint.pieces import Piece
from stretto.checkpoint.saved import Saved

Optimizer = torch.optim.Optimizer


def weight_pieces(stack: Stack) -> list[Piece]:
    """Return the weights and buffers of a stack."""
    return [Piece(f"weights.{name}", tensor) for name, tensor in stack.state_dict().items()]


def optimizer_pieces(stack: Stack, optimizer: Optimizer | None) -> list[Piece]:
    """Return what the optimizer knows of a stack's weights."""
    if optimizer is None:
        return []
    return [
        Piece(f"optimizer.{name}.{key}", value)
        for name, weight in stack.named_parameters()
        for key, value in optimizer.state.get(weight, {}).items()
        if isinstance(value, Tensor)
    ]


def lane_pieces(stack: Stack, state: State, numbers: range, num_lanes: int) -> list[Piece]:
    """Return the states of some lanes at the blocks of a stack."""
    return [
        Piece(f"lanes.{block}.{index}", tensor, numbers.start, num_lanes)
        for block, own in enumerate(stack.split_state(state), stack.first)
        for index, tensor in enumerate(own)
    ]


def own_part(pieces: Sequence[Piece], replica: int, num_replicas: int) -> list[Piece]:
    """Return those of the pieces, which all replicas hold, that this one writes: about as many bytes as the others."""
    loads = [0] * num_replicas
    own = []
    for piece in sorted(pieces, key=lambda piece: (-piece.tensor.nbytes, piece.name)):
        least = loads.index(min(loads))
        loads[least] += piece.tensor.nbytes
        if least == replica:
            own.append(piece)
    return own


def blank_optimizer(stack: Stack, saved: Saved) -> dict[str, dict[str, Tensor]]:
    """Return tensors for what was saved of the optimizer, by weight and key."""
    weights = dict(stack.named_parameters())
    found: dict[str, dict[str, Tensor]] = {}
    for full, part in saved.manifest.tensors().items():
        name, _, key = full.removeprefix("optimizer.").rpartition(".")
        weight = weights.get(name)
        if weight is None or not full.startswith("optimizer."):
            continue
        if part.whole not in ((), tuple(weight.shape)):
            raise DataError(f"{saved.where}: {full} is {list(part.whole)}; it is of another model")
        tensor = torch.zeros(part.whole, dtype=getattr(torch, part.dtype), device=weight.device)
        found.setdefault(name, {})[key] = tensor
    return found


def set_optimizer(stack: Stack, optimizer: Optimizer | None, states: Mapping[str, dict[str, Tensor]]) -> None:
    """Let the optimizer go on from what was saved."""
    if optimizer is not None:
        optimizer.state.clear()
        for name, weight in stack.named_parameters():
            if name in states:
                optimizer.state[weight] = states[name]


def blank_lanes(stack: Stack, num_rows: int, device: torch.device) -> State:
    """Return a state of some lanes, to be filled."""
    rows = Rows.of(num_rows, device=device, dtype=stack.dtype)
    with torch.no_grad():
        return tuple(tensor.detach().clone() for tensor in stack.initial_state(rows))
