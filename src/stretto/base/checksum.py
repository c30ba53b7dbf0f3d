"""Checksums of tensors, computed on their device: nothing but the sums is copied to the host."""

from collections.abc import Sequence

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, read as integers, modulo 2^64: a scalar on its device.

    A flipped bit always changes it. Sums of integers do not depend on the order, so each device gets the same.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    # Words of 8 bytes, where the tensor has whole ones, are added several times as fast as smaller integers.
    if flat.nbytes % 8:
        return flat.view(_INTEGERS[flat.itemsize]).sum(dtype=torch.int64)
    # The sum must not depend on where in memory a tensor begins, which may differ from rank to rank.
    is_aligned = flat.storage_offset() * flat.itemsize % 8 == 0
    return (flat if is_aligned else flat.clone()).view(torch.int64).sum()


def checksums(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the checksum of each tensor, as a vector on `device`."""
    if not tensors:
        return torch.zeros(0, dtype=torch.int64, device=device)
    return torch.stack([checksum(tensor).to(device) for tensor in tensors])
