"""Losses return a sum and a count instead of a mean, so that the losses of micro-batches can be summed.

A missing target (the ignore index, or NaN) adds nothing to the sum or the count.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.base.window import IGNORE_INDEX


@dataclass(frozen=True)
class LossSum:
    """A loss summed over all valid targets, and their number."""

    total: Tensor  # scalar, floating-point
    count: Tensor  # scalar, int64
    num_correct: Tensor | None = None  # scalar, int64: the number of correct predictions, for losses that count them


Loss = Callable[[Tensor, Tensor], LossSum]
"""A function `(outputs, targets) -> LossSum`; both tensors are time-major."""


def _full_precision(y: Tensor) -> Tensor:
    """Return outputs as float32, but float64 unchanged: bf16 from autocast is too coarse for a sum of many terms."""
    return y if y.dtype == torch.float64 else y.float()


@dataclass(frozen=True)
class TokenLoss:
    """Cross-entropy of one token per time step. Outputs `[time, batch, classes]`, targets `[time, batch]`."""

    ignore_index: int = IGNORE_INDEX

    def __call__(self, y: Tensor, targets: Tensor) -> LossSum:
        logits = _full_precision(y).flatten(0, -2)
        total = F.cross_entropy(logits, targets.flatten(), ignore_index=self.ignore_index, reduction="sum")
        return LossSum(total, (targets != self.ignore_index).sum())


@dataclass(frozen=True)
class SequenceLoss:
    """Cross-entropy of one label per row, at the row's last valid time step.

    Outputs `[time, batch, classes]`; targets `[time, batch]` from `last_step_targets`, so that a chunk of a window has
    targets only for the rows that end in it.
    """

    ignore_index: int = IGNORE_INDEX

    def __call__(self, y: Tensor, targets: Tensor) -> LossSum:
        # Not `y[is_valid]`: on an accelerator, the host would wait for the number of valid targets.
        logits, labels = _full_precision(y).flatten(0, -2), targets.flatten()
        total = F.cross_entropy(logits, labels, ignore_index=self.ignore_index, reduction="sum")
        is_valid = labels != self.ignore_index
        is_correct = (logits.argmax(dim=-1) == labels) & is_valid
        return LossSum(total, is_valid.sum(), is_correct.sum())


def last_step_targets(labels: Tensor, lengths: Tensor, num_steps: int, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Return targets `[time, batch]`: each row's label at its last valid time step, `ignore_index` elsewhere."""
    targets = labels.new_full((num_steps, len(labels)), ignore_index)
    rows = torch.nonzero(lengths > 0).squeeze(1)
    targets[lengths[rows] - 1, rows] = labels[rows]
    return targets


@dataclass(frozen=True)
class SquaredError:
    """Squared error; NaN targets are ignored. Outputs and targets have the same shape."""

    def __call__(self, y: Tensor, targets: Tensor) -> LossSum:
        error, count = _error(y, targets)
        return LossSum(error.square().sum(), count)


@dataclass(frozen=True)
class AbsoluteError:
    """Absolute error; NaN targets are ignored. Outputs and targets have the same shape."""

    def __call__(self, y: Tensor, targets: Tensor) -> LossSum:
        error, count = _error(y, targets)
        return LossSum(error.abs().sum(), count)


@dataclass(frozen=True)
class QuantileLoss:
    """Pinball loss for several quantiles. Outputs `[..., quantiles]`, targets `[...]`; NaN targets are ignored.

    Each target counts once per quantile. Only for your own scripts: `stretto.serve.forecast` can't forecast quantiles.
    """

    quantiles: tuple[float, ...] = (0.1, 0.5, 0.9)

    def __post_init__(self) -> None:
        for quantile in self.quantiles:
            if not 0 < quantile < 1:
                raise ConfigError(
                    f"quantiles={self.quantiles} are not all between 0 and 1; use values such as 0.1, 0.5, 0.9"
                )

    def __call__(self, y: Tensor, targets: Tensor) -> LossSum:
        if y.shape != (*targets.shape, len(self.quantiles)):
            raise ConfigError(
                f"outputs {list(y.shape)} don't have the shape of targets {list(targets.shape)} plus a last dim of "
                f"{len(self.quantiles)} quantiles; add it to the last block's outputs"
            )
        error, count = _error(y, targets.unsqueeze(-1).expand_as(y))
        # One quantile at a time: a tensor of all quantiles would have to be copied to the device.
        losses = [
            torch.maximum(quantile * part, (quantile - 1) * part).sum()
            for quantile, part in zip(self.quantiles, error.unbind(-1), strict=True)
        ]
        return LossSum(torch.stack(losses).sum(), count)


def _error(y: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return `targets - y`, with zeros (and no gradient) for missing targets, and the number of valid targets."""
    if y.shape != targets.shape:
        raise ConfigError(f"outputs {list(y.shape)} and targets {list(targets.shape)} differ in shape; make them equal")
    is_missing = targets.isnan()
    # Not a product with a mask: NaN times zero is NaN, in forward and backward.
    error = (targets - _full_precision(y)).masked_fill(is_missing, 0.0)
    return error, (~is_missing).sum()
