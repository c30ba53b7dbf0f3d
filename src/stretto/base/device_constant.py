"""DeviceConstant: numbers as a tensor that is copied to each device once."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from stretto.base.device_copy import to_device


@dataclass(frozen=True)
class DeviceConstant:
    """Numbers as a tensor, copied to a device only the first time that they are needed there."""

    numbers: tuple[float, ...]
    _copies: dict[tuple[torch.device, torch.dtype], Tensor] = field(default_factory=dict, compare=False, repr=False)

    def like(self, tensor: Tensor) -> Tensor:
        """Return the numbers in the dtype and on the device of `tensor`."""
        key = (tensor.device, tensor.dtype)
        if key not in self._copies:
            # The copy outlives an evaluation in inference mode, whose tensors training could not use.
            with torch.inference_mode(False):
                numbers = torch.tensor(self.numbers, dtype=tensor.dtype, device="cpu")
                self._copies[key] = to_device(numbers, tensor.device)
        return self._copies[key]
