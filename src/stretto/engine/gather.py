"""Gathers the tensors of all stages on every rank, by name."""

import torch
from torch import Tensor

from stretto.blocks.stack import Stack
from stretto.mesh.mesh import Mesh


def gather_model_tensors(model: Stack, parts: list[slice], local: dict[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Return the tensors of the whole model by name, on every rank and on the CPU.

    `local` has the tensors of this rank; one that it lacks, such as a missing gradient, becomes zeros. `model`, which
    may be on the meta device, gives all names and shapes, and `parts` the slice of blocks that each stage holds.
    """
    gathered: dict[str, Tensor] = {}
    for stage, part in enumerate(parts):
        source = mesh.topology.rank(0, stage)
        for name, reference in model[part].state_dict().items():
            tensor = local.get(name) if mesh.stage == stage else None
            if tensor is None:
                tensor = torch.zeros(reference.shape, dtype=reference.dtype, device=mesh.world.device)
            # Clone, because the broadcast overwrites the tensor on all replicas but the first.
            gathered[name] = mesh.world.broadcast(tensor.detach().clone(), source).cpu()
    return gathered
