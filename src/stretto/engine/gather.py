"""Gathers the tensors of all stages on every rank, by name or as a model."""

import copy
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.blocks.loss_weights import attach_loss
from stretto.blocks.stack import Stack
from stretto.blocks.ties import load_tensors
from stretto.blocks.vocab_shard import shard_rows
from stretto.engine.engine import Engine
from stretto.mesh.mesh import Mesh


def gather_model(engine: Engine, model: Stack) -> Stack:
    """Return the complete model with the engine's weights, a copy in the CPU's memory, for any layout. Collective.

    `model` is the one that the engine was made from. With several stages, its own blocks have trained weights only
    where they belong to this rank's stage. All ranks must call this, and all of them get the complete model.
    """
    mesh = engine.mesh
    if engine.row_loss is not None:
        model = attach_loss(model, engine.row_loss)
    split_blocks = tuple(engine.stack.shards)
    (count,) = mesh.world.all_reduce([len(engine.stack) / mesh.num_copies])
    num_blocks = round(count) + bool(split_blocks)
    if num_blocks != len(model):
        raise ConfigError(
            f"model has {len(model)} blocks, but the engine's model has {num_blocks}; pass the model that the engine "
            "was made from"
        )
    parts = _find_parts(engine, model)
    complete = copy.deepcopy(model)
    load_tensors(
        complete, gather_model_tensors(model, parts, engine.stack.state_dict(), mesh, split_blocks=split_blocks)
    )
    return complete.to("cpu")


def _find_parts(engine: Engine, model: Stack) -> list[slice]:
    """Return the slices of blocks that the stages hold, in rounds over the stages: slice i is that of stage i mod n."""
    mesh, num_blocks = engine.mesh, len(model)
    stages = [0.0] * num_blocks
    for index in engine.stack.indices:
        stages[index - model.first] = mesh.stage / mesh.num_copies
    holders = [round(stage) for stage in mesh.world.all_reduce(stages)]
    if engine.stack.shards:
        holders[-1] = mesh.num_stages - 1
    edges = [index for index in range(1, num_blocks) if holders[index] != holders[index - 1]]
    return [slice(start, stop) for start, stop in pairwise([0, *edges, num_blocks])]


def gather_model_tensors(
    model: Stack, parts: list[slice], local: dict[str, Tensor], mesh: Mesh, *, split_blocks: Sequence[int] = ()
) -> dict[str, Tensor]:
    """Return the tensors of the whole model by name, on every rank and on the CPU.

    `local` has the tensors of this rank; one that it lacks, such as a missing gradient, becomes zeros. `model`, which
    may be on the meta device, gives all names and shapes, and `parts` the slices of blocks that the stages hold, in
    rounds over the stages. Of the tensors of the blocks with these indices, the `split_blocks`, the stages hold some
    rows each.
    """
    gathered: dict[str, Tensor] = {}
    split_prefixes = tuple(f"blocks.{index}." for index in split_blocks)
    for index, part in enumerate(parts):
        stage = index % mesh.num_stages
        source = mesh.topology.rank(0, stage)
        for name, reference in model[part].state_dict().items():
            if name.startswith(split_prefixes):
                gathered[name] = _gather_rows(reference, local.get(name), mesh)
                continue
            tensor = local.get(name) if mesh.stage == stage else None
            gathered[name] = _broadcast(reference, tensor, source, mesh)
    return gathered


def _gather_rows(reference: Tensor, local: Tensor | None, mesh: Mesh) -> Tensor:
    """Return a tensor whose rows the stages split."""
    parts = []
    for stage in range(mesh.num_stages):
        rows = shard_rows(len(reference), stage, mesh.num_stages)
        tensor = local if mesh.stage == stage else None
        parts.append(_broadcast(reference[rows.start : rows.stop], tensor, mesh.topology.rank(0, stage), mesh))
    return torch.cat(parts)


def _broadcast(reference: Tensor, tensor: Tensor | None, source: int, mesh: Mesh) -> Tensor:
    if tensor is None:
        tensor = torch.zeros(reference.shape, dtype=reference.dtype, device=mesh.world.device)
    # Clone, because the broadcast overwrites the tensor on all replicas but the first.
    return mesh.world.broadcast(tensor.detach().clone(), source).cpu()
