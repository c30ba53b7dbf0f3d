"""A trainer's tensors as shards, which a trainer in any other layout can load.

weights.<name>             parameters and buffers, by their names in the whole model; a tied one once, by its first
                           (stages that split a table save its rows under one name)
optimizer.<name>.<key>     the optimizer's state for each parameter
copy_weights.<name> ...    with `train.spike`: copies of the above, and of averages, that a spike goes back to
lanes.<block>.<number>     the state tensors of each block, with one row per lane of all replicas
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from stretto.base.errors import ConfigError, DataError
from stretto.base.state import State
from stretto.base.window import Rows
from stretto.blocks.stack import Stack
from stretto.checkpoint.checkpoint import Checkpoint
from stretto.checkpoint.manifest import MAX_DIGEST_BYTES
from stretto.checkpoint.shards import TensorShard
from stretto.mesh.stage_group import StageGroup

Optimizer = torch.optim.Optimizer
# A digest of lanes covers at least so many bytes, and more if a tensor, of all replicas, would have more digests.
_MIN_LANE_DIGEST_BYTES, _MAX_LANE_DIGESTS = 16 << 10, 1 << 14


def weight_shards(stack: Stack) -> list[TensorShard]:
    """Return a stack's parameters and buffers as shards."""
    return [
        TensorShard(f"weights.{name}", tensor, *stack.rows_of(name)) for name, tensor in stack.named_tensors().items()
    ]


def optimizer_shards(stack: Stack, optimizer: Optimizer) -> list[TensorShard]:
    """Return the optimizer's state for a stack's parameters as shards."""
    shards = []
    for name, weight in stack.named_weights().items():
        for key, value in optimizer.state.get(weight, {}).items():
            if isinstance(value, Tensor):
                shards.append(optimizer_shard(stack, name, key, value))
            elif value is not None:
                # If this value were left out, training would silently differ after a resume.
                raise ConfigError(
                    f"the optimizer's {key!r} for {name} is of type {type(value).__name__}, which can't be saved; use "
                    "an optimizer whose state consists of tensors"
                )
    return shards


def optimizer_shard(stack: Stack, name: str, key: str, value: Tensor, kind: str = "optimizer") -> TensorShard:
    """Return a tensor of the optimizer's state for a parameter; it has the rows that the stack has of the parameter."""
    # A counter has no rows.
    rows = stack.rows_of(name) if value.dim() else (0, None)
    return TensorShard(f"{kind}.{name}.{key}", value, *rows)


def lane_shards(stack: Stack, state: State, lane_indices: range, num_lanes: int) -> list[TensorShard]:
    """Return the hidden state of the lanes `lane_indices`, out of `num_lanes` in all replicas together, as shards."""
    shards = []
    for block, block_state in zip(stack.indices, stack.split_state(state), strict=True):
        for number, tensor in enumerate(block_state):
            full_bytes = tensor.nbytes * num_lanes // max(len(lane_indices), 1)
            # Another number of replicas cuts the lanes elsewhere, and two of them read the digest's bytes at each cut.
            digest_bytes = min(max(_MIN_LANE_DIGEST_BYTES, full_bytes // _MAX_LANE_DIGESTS), MAX_DIGEST_BYTES)
            name = f"lanes.{block}.{number}"
            shards.append(TensorShard(name, tensor, lane_indices.start, num_lanes, digest_bytes))
    return shards


def shards_of_stage(stack: Stack, shards: Iterable[TensorShard]) -> list[TensorShard]:
    """Return the shards that this stage saves, so that over all stages each is saved once.

    Those of a weight that stages share are saved by the first of them only. If stages split the rows of a weight,
    each saves its own, and the one with the first row saves what belongs to all rows, such as a counter.
    """
    own = []
    for shard in shards:
        name = shard.name.partition(".")[2]
        if stack.has_block_of(name) and (shard.full_rows is not None or stack.rows_of(name)[0] == 0):
            own.append(shard)
    return own


def split_tied(
    shards: Iterable[TensorShard], groups: Mapping[str, StageGroup]
) -> tuple[list[TensorShard], list[tuple[TensorShard, StageGroup]]]:
    """Return the shards that only this stage holds, and those of tied weights, with the group of their stages.

    All stages have the latter in the same order. Counters count as the former: they are small, and may be elsewhere
    than on the device.
    """
    untied, tied = [], []
    for shard in shards:
        kind, _, name = shard.name.partition(".")
        group = groups.get(name.rpartition(".")[0] if kind.endswith("optimizer") else name)
        if group is None or not shard.tensor.dim():
            untied.append(shard)
        else:
            tied.append((shard, group))
    return untied, sorted(tied, key=lambda pair: pair[0].name)


def allocate_optimizer_state(
    stack: Stack, optimizer: Optimizer, checkpoint: Checkpoint, kind: str = "optimizer"
) -> dict[str, dict[str, Tensor]]:
    """Return tensors to load the saved optimizer state into, by parameter name and key.

    `kind` is what the names of the saved tensors begin with.
    """
    weights = stack.named_weights()
    is_fused = {
        weight: bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        for weight in group["params"]
    }
    states: dict[str, dict[str, Tensor]] = {}
    for full_name, saved in checkpoint.manifest.tensors().items():
        name, _, key = full_name.removeprefix(f"{kind}.").rpartition(".")
        weight = weights.get(name)
        if weight is None or not full_name.startswith(f"{kind}."):
            continue
        # Under a key, torch's optimizers keep a scalar or at most one value per element; more is from another model.
        _, num_rows = stack.rows_of(name)
        full_shape = list(weight.shape) if num_rows is None else [num_rows, *weight.shape[1:]]
        if math.prod(saved.full_shape) > max(math.prod(full_shape), 1):
            raise DataError(
                f"{checkpoint.location}: {full_name} has shape {list(saved.full_shape)}, but the parameter has "
                f"{full_shape}; the checkpoint is from a different model"
            )
        # Unless it is fused, torch's optimizers keep counters in host memory: on a device, each step would wait for it.
        is_counter = not saved.full_shape and (key == "step" or weight.dim() > 0) and not is_fused.get(weight, False)
        device = torch.device("cpu") if is_counter else weight.device
        # Of a table that stages split, this one has as many rows as of the parameter.
        has_rows = num_rows is not None and saved.full_shape[:1] == (num_rows,)
        shape = (len(weight), *saved.full_shape[1:]) if has_rows else saved.full_shape
        states.setdefault(name, {})[key] = torch.zeros(shape, dtype=getattr(torch, saved.dtype), device=device)
    return states


def set_optimizer_state(stack: Stack, optimizer: Optimizer, states: Mapping[str, dict[str, Tensor]]) -> None:
    """Replace the optimizer's state with these tensors, by parameter name and key."""
    optimizer.state.clear()
    for name, weight in stack.named_weights().items():
        if name in states:
            optimizer.state[weight] = states[name]


def allocate_lane_state(stack: Stack, num_rows: int, device: torch.device) -> State:
    """Return the initial hidden state of `num_rows` lanes, as tensors to load saved values into."""
    rows = Rows.of(num_rows, device=device, dtype=stack.dtype)
    with torch.no_grad():
        return tuple(tensor.detach().clone() for tensor in stack.initial_state(rows))
