"""all_gather: every rank gets the tensors of all ranks, whose shapes and dtypes may differ."""

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.base.device_copy import to_device
from stretto.mesh.world import World

_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
_MAX_DIMS = 8


def all_gather(world: World, tensor: Tensor | None) -> list[Tensor]:
    """Return the tensors of all ranks, in the order of their ranks, on every rank; a rank with None adds none.

    The ranks first exchange shapes. Then each sends its bytes, padded to the largest number of bytes of a rank.
    """
    if world.is_single_rank:
        return [] if tensor is None else [tensor]
    headers = torch.zeros(world.size, 3 + _MAX_DIMS, dtype=torch.float64)
    if tensor is not None:
        assert tensor.dim() <= _MAX_DIMS
        header = [1, _DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        headers[world.rank, : len(header)] = torch.tensor(header, dtype=torch.float64)
    numbers = world.sum_over_ranks(to_device(headers.flatten(), world.device), "all_gather")
    rows = torch.tensor(numbers, dtype=torch.float64).view_as(headers).long().tolist()
    specs = [(_DTYPES[row[1]], tuple(row[3 : 3 + row[2]])) if row[0] else None for row in rows]
    sizes = [0 if spec is None else spec[0].itemsize * torch.Size(spec[1]).numel() for spec in specs]
    own = torch.zeros(max(sizes), dtype=torch.uint8, device=world.device)
    if tensor is not None:
        own[: tensor.nbytes] = tensor.detach().to(world.device).contiguous().flatten().view(torch.uint8)
    parts = [torch.empty_like(own) for _ in range(world.size)]
    if len(own):
        with world.collective("all_gather"):
            dist.all_gather(parts, own)
    return [
        part[:size].view(spec[0]).reshape(spec[1])
        for part, size, spec in zip(parts, sizes, specs, strict=True)
        if spec is not None
    ]
