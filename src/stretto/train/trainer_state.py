"""Memory: what a trainer's step leaves in tensors, as shards that any other layout can take up.

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
from stretto.checkpoint.checkpoint import Checkpoint
from stretto.checkpoint.shards import TensorShard

Optimizer = torch.optim.Optimizer


def weight_shards(stack: Stack) -> list[TensorShard]:
    """Return the weights and buffers of a stack."""
    return [TensorShard(f"weights.{name}", tensor) for name, tensor in stack.state_dict().items()]


def optimizer_shards(stack: Stack, optimizer: Optimizer) -> list[TensorShard]:
    """Return what the optimizer knows of a stack's weights."""
    return [
        TensorShard(f"optimizer.{name}.{key}", value)
        for name, weight in stack.named_parameters()
        for key, value in optimizer.state.get(weight, {}).items()
        if isinstance(value, Tensor)
    ]


def lane_shards(stack: Stack, state: State, numbers: range, num_lanes: int) -> list[TensorShard]:
    """Return the states of some lanes at the blocks of a stack."""
    return [
        TensorShard(f"lanes.{block}.{index}", tensor, numbers.start, num_lanes)
        for block, own in enumerate(stack.split_state(state), stack.first)
        for index, tensor in enumerate(own)
    ]


def shards_to_write(shards: Sequence[TensorShard], replica: int, num_replicas: int) -> list[TensorShard]:
    """Return those of the shards, which all replicas hold, that this one writes: about as many bytes as the others."""
    loads = [0] * num_replicas
    own = []
    for shard in sorted(shards, key=lambda shard: (-shard.tensor.nbytes, shard.name)):
        least = loads.index(min(loads))
        loads[least] += shard.tensor.nbytes
        if least == replica:
            own.append(shard)
    return own


def empty_optimizer_state(stack: Stack, saved: Checkpoint) -> dict[str, dict[str, Tensor]]:
    """Return tensors for what was saved of the optimizer, by weight and key."""
    weights = dict(stack.named_parameters())
    found: dict[str, dict[str, Tensor]] = {}
    for full, part in saved.manifest.tensors().items():
        name, _, key = full.removeprefix("optimizer.").rpartition(".")
        weight = weights.get(name)
        if weight is None or not full.startswith("optimizer."):
            continue
        if part.full_shape not in ((), tuple(weight.shape)):
            raise DataError(f"{saved.location}: {full} is {list(part.full_shape)}; it is of another model")
        tensor = torch.zeros(part.full_shape, dtype=getattr(torch, part.dtype), device=weight.device)
        found.setdefault(name, {})[key] = tensor
    return found


def set_optimizer_state(stack: Stack, optimizer: Optimizer, states: Mapping[str, dict[str, Tensor]]) -> None:
    """Let the optimizer go on from what was saved."""
    optimizer.state.clear()
    for name, weight in stack.named_parameters():
        if name in states:
            optimizer.state[weight] = states[name]


def empty_lane_state(stack: Stack, num_rows: int, device: torch.device) -> State:
    """Return a state of some lanes, to be filled."""
    rows = Rows.of(num_rows, device=device, dtype=stack.dtype)
    with torch.no_grad():
        return tuple(tensor.detach().clone() for tensor in stack.initial_state(rows))
