"""Gather: what the stages hold, brought together by absolute names."""

import torch
from torch import Tensor

from stretto.blocks.stack import Stack
from stretto.mesh.mesh import Mesh


def gather_model_tensors(model: Stack, parts: list[slice], own: dict[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Return every rank's copy of the tensors of a whole model, by name, on the CPU.

    `own` holds this rank's; `model` (maybe on the meta device) says which names and shapes there are, and `parts` who
    has them.
    """
    found: dict[str, Tensor] = {}
    for stage, part in enumerate(parts):
        for name, like in model[part].state_dict().items():
            source = mesh.topology.rank(0, stage)
            mine = own.get(name) if mesh.stage == stage else None
            tensor = torch.zeros(like.shape, dtype=like.dtype, device=mesh.world.device) if mine is None else mine
            found[name] = mesh.world.broadcast(tensor.detach().clone(), source).cpu()
    return found
