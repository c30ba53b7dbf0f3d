"""Losses: a sum and a count, never a mean, so that parts of a batch add up to the whole.

Where nothing is asked the target says so (the ignore index, or NaN); such places give no loss and no count.
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
    """A loss summed over what was asked, and how much was asked."""

    total: Tensor  # [] floating
    count: Tensor  # [] int64
    num_correct: Tensor | None = None  # [] int64, how many answers were right, of a loss that can say so


Loss = Callable[[Tensor, Tensor], LossSum]
"""`(outputs, targets) -> LossSum`, both time-major; any such function is a loss."""


def _full_precision(y: Tensor) -> Tensor:
    """Sums of many small terms need at least float32, also where autocast gave bf16."""
    return y if y.dtype == torch.float64 else y.float()


@dataclass(frozen=True)
class TokenLoss:
    """Cross-entropy of each step's token. Outputs `[time, batch, classes]`, targets `[time, batch]`."""

    ignore_index: int = IGNORE_INDEX

    def __call__(self, y: Tensor, targets: Tensor) -> LossSum:
        logits = _full_precision(y).flatten(0, -2)
        total = F.cross_entropy(logits, targets.flatten(), ignore_index=self.ignore_index, reduction="sum")
        return LossSum(total, (targets != self.ignore_index).sum())


@dataclass(frozen=True)
class SequenceLoss:
    """Cross-entropy of one label a row, asked at the row's last valid step.

    Outputs `[time, batch, classes]`; targets `[time, batch]` from `last_step_targets`, so that a chunk
    of a window is asked exactly for the rows that end in it.
    """

    ignore_index: int = IGNORE_INDEX

    def __call__(self, y: Tensor, targets: Tensor) -> LossSum:
        asked = targets != self.ignore_index
        answers, labels = _full_precision(y[asked]), targets[asked]
        total = F.cross_entropy(answers, labels, reduction="sum")
        return LossSum(total, asked.sum(), (answers.argmax(dim=-1) == labels).sum())


def last_step_targets(labels: Tensor, lengths: Tensor, num_steps: int, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Return targets `[time, batch]` that ask for each row's label at its last valid step only."""
    targets = labels.new_full((num_steps, len(labels)), ignore_index)
    rows = torch.nonzero(lengths > 0).squeeze(1)
    targets[lengths[rows] - 1, rows] = labels[rows]
    return targets


@dataclass(frozen=True)
class SquaredError:
    """Squared error of real numbers, missing where the target is NaN. Outputs and targets of one shape."""

    def __call__(self, y: Tensor, targets: Tensor) -> LossSum:
        error, count = _error(y, targets)
        return LossSum(error.square().sum(), count)


@dataclass(frozen=True)
class AbsoluteError:
    """Absolute error of real numbers, missing where the target is NaN. Outputs and targets of one shape."""

    def __call__(self, y: Tensor, targets: Tensor) -> LossSum:
        error, count = _error(y, targets)
        return LossSum(error.abs().sum(), count)


@dataclass(frozen=True)
class QuantileLoss:
    """Pinball loss of several quantiles. Outputs `[..., quantiles]`, targets `[...]` with NaN where missing."""

    quantiles: tuple[float, ...] = (0.1, 0.5, 0.9)

    def __post_init__(self) -> None:
        for quantile in self.quantiles:
            if not 0 < quantile < 1:
                raise ConfigError(f"quantile {quantile} is not between 0 and 1; use values such as 0.1, 0.5, 0.9")

    def __call__(self, y: Tensor, targets: Tensor) -> LossSum:
        if y.shape != (*targets.shape, len(self.quantiles)):
            raise ConfigError(
                f"outputs {list(y.shape)} don't have the shape of targets {list(targets.shape)} and, last, "
                f"{len(self.quantiles)} quantiles; make the head's last dim the quantiles"
            )
        error, count = _error(y, targets.unsqueeze(-1).expand_as(y))
        levels = torch.tensor(self.quantiles, dtype=error.dtype, device=error.device)
        return LossSum(torch.maximum(levels * error, (levels - 1) * error).sum(), count)


def _error(y: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """`targets - y` with zero (and so no gradient) where the target is missing, and how many are not."""
    if y.shape != targets.shape:
        raise ConfigError(f"outputs {list(y.shape)} and targets {list(targets.shape)} differ in shape; make them equal")
    missing = targets.isnan()
    # Filled, not multiplied: NaN times zero would still be NaN, forward and backward.
    error = (targets - _full_precision(y)).masked_fill(missing, 0.0)
    return error, (~missing).sum()
