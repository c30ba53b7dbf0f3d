"""Standardize: scales channels with the mean and standard deviation of the training data, as the first block."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.base.device_constant import DeviceConstant
from stretto.base.errors import ConfigError
from stretto.base.state import State
from stretto.blocks.block import Block


class Standardize(Block):
    """`(x - mean) / std` of each channel, and 0 where a value is missing (NaN); it has no weights.

    With `masks`, outputs have one more feature per channel: 1 where its value is present, 0 where it is missing. Data
    that stretto prepared is scaled already when a model reads it; this block is for raw values.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], *, masks: bool = False) -> None:
        super().__init__()
        self.mean, self.std, self.masks = tuple(map(float, mean)), tuple(map(float, std)), masks
        if len(self.mean) != len(self.std) or not all(value > 0 for value in self.std):
            raise ConfigError(
                f"Standardize needs one mean and one std > 0 per channel, not {len(self.mean)} means and std="
                f"{list(self.std)}; use 1 for a channel that never changes"
            )
        self._mean, self._std = DeviceConstant(self.mean), DeviceConstant(self.std)

    def extra_repr(self) -> str:
        return f"{len(self.mean)} channels, masks={self.masks}"

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        if x.shape[-1] != len(self.mean):
            raise ConfigError(f"Standardize has {len(self.mean)} channels, but got {x.shape[-1]}; give one per channel")
        is_missing = x.isnan()
        scaled = ((x - self._mean.like(x)) / self._std.like(x)).masked_fill(is_missing, 0.0)
        return torch.cat([scaled, (~is_missing).to(x.dtype)], dim=-1) if self.masks else scaled, state
