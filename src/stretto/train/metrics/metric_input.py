"""MetricInput: outputs and targets as metrics get them, without padding and missing targets."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from stretto.blocks.losses import full_precision


@dataclass(frozen=True)
class MetricInput:
    """Outputs and targets of some time steps of some rows; `[n, ...]`, where n is time steps times rows."""

    outputs: Tensor  # [n, classes], [n, values]; float32 or float64
    targets: Tensor  # [n] for classes, [n, values]; missing ones are negative or NaN

    @classmethod
    def of(cls, y: Tensor, targets: Tensor) -> "MetricInput":
        """Return the outputs and targets of a chunk, both `[time, batch, ...]`."""
        y = full_precision(y)
        targets = targets.to(y.dtype) if targets.is_floating_point() else targets
        return cls(y.flatten(0, 1), targets.flatten(0, 1))

    @property
    def has_classes(self) -> bool:
        """Whether targets are classes, and not values."""
        return not self.targets.is_floating_point()

    @cached_property
    def is_missing(self) -> Tensor:
        """Which targets are missing; of the shape of `targets`."""
        # A user's loss may ignore another negative number than IGNORE_INDEX.
        return self.targets < 0 if self.has_classes else self.targets.isnan()

    @cached_property
    def predicted(self) -> Tensor:
        """The class with the highest output, for each target."""
        return self.outputs.argmax(dim=-1)

    @cached_property
    def present(self) -> tuple[Tensor, Tensor]:
        """Outputs and targets of the time steps that have a target. On an accelerator, the host waits for it."""
        is_present = ~self.is_missing.flatten(1).all(dim=1) if self.targets.dim() > 1 else ~self.is_missing
        indices = torch.nonzero(is_present).squeeze(1)
        return self.outputs.index_select(0, indices), self.targets.index_select(0, indices)
