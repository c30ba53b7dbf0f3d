"""Copies tensors to a device without making the host wait."""

import torch
from torch import Tensor

_WITHOUT_QUEUE = ("cpu", "meta")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device`. The host doesn't wait for the copy, so don't modify a CPU tensor afterwards.

    A copy from ordinary (pageable) CPU memory to a GPU would make the host wait for all work queued on the device.
    """
    if tensor.device.type == "cpu" and device.type not in _WITHOUT_QUEUE:
        tensor = tensor.pin_memory()  # returns the same tensor if it is pinned already
    return tensor.to(device, non_blocking=True)
