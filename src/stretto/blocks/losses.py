"""Losses return a sum and a count instead of a mean, so that the losses of micro-batches can be summed.

A missing target (the ignore index, or NaN) adds nothing to the sum or the count.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.base.device_constant import DeviceConstant
from stretto.base.errors import ConfigError, DataError
from stretto.base.window import IGNORE_INDEX


@dataclass(frozen=True)
class LossSum:
    """A loss summed over all valid targets, and their number."""

    total: Tensor  # scalar, floating-point
    count: Tensor  # scalar, int64
    num_correct: Tensor | None = None  # scalar, int64: the number of correct predictions, for losses that count them
    weight: Tensor | None = None  # scalar: the sum of the targets' weights; None if each has weight 1


Loss = Callable[[Tensor, Tensor], LossSum]
"""A function `(outputs, targets) -> LossSum`; both tensors are time-major."""


def full_precision(y: Tensor) -> Tensor:
    """Return outputs as float32, but float64 unchanged: bf16 from autocast is too coarse for a sum of many terms."""
    return y if y.dtype == torch.float64 else y.float()


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of classes: a token or label per time step, or a label per row at the row's last time step.

    Outputs `[time, batch, classes]`, targets `[time, batch]`; IGNORE_INDEX (and `ignore_index`) mark missing targets.
    `class_weights` and `label_smoothing` are those of `nn.CrossEntropyLoss`: the mean divides by the targets' weights.
    In evaluations, labels are not smoothed, and correct predictions are counted.
    """

    class_weights: tuple[float, ...] = ()  # one per class; by default all classes have the same weight
    label_smoothing: float = 0.0
    ignore_index: int = IGNORE_INDEX
    _weights: DeviceConstant = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        weights = tuple(map(float, self.class_weights))
        if not all(0 <= weight < torch.inf for weight in weights):
            raise ConfigError(f"class_weights={weights} must not be negative or infinite; use values such as 0.5, 2")
        if not 0 <= self.label_smoothing <= 1:
            raise ConfigError(
                f"label_smoothing={self.label_smoothing} must be between 0 and 1; use a value such as 0.1"
            )
        object.__setattr__(self, "class_weights", weights)
        object.__setattr__(self, "_weights", DeviceConstant(weights))

    def __call__(self, y: Tensor, targets: Tensor) -> LossSum:
        logits, labels = full_precision(y).flatten(0, -2), targets.flatten()
        self._check(y, targets)
        if self.ignore_index != IGNORE_INDEX:  # padding is always IGNORE_INDEX
            labels = labels.masked_fill(labels == IGNORE_INDEX, self.ignore_index)
        weights = self._weights.like(logits) if self.class_weights else None
        try:
            total = F.cross_entropy(
                logits,
                labels,
                weights,
                ignore_index=self.ignore_index,
                reduction="sum",
                label_smoothing=self.label_smoothing if torch.is_grad_enabled() else 0.0,
            )
        except IndexError as error:
            raise wrong_class_error(labels, y.shape[-1], self.ignore_index) from error
        return sum_classes(total, logits, labels, weights, self.ignore_index)

    def _check(self, y: Tensor, targets: Tensor) -> None:
        if targets.is_floating_point() or y.shape[:-1] != targets.shape:
            kind = "floats" if targets.is_floating_point() else "integers"
            raise ConfigError(
                f"CrossEntropy takes outputs [..., classes] and integer targets [...], not outputs {list(y.shape)} and "
                f"{kind} {list(targets.shape)}; use SquaredError for numbers"
            )
        if self.class_weights and len(self.class_weights) != y.shape[-1]:
            raise ConfigError(
                f"class_weights has {len(self.class_weights)} numbers, but the model has {y.shape[-1]} outputs; "
                "give one weight per class"
            )


def wrong_class_error(labels: Tensor, num_classes: int, ignore_index: int) -> DataError:
    """Return the error for a target that is out of range. Only the CPU raises it; a GPU has a device-side assert."""
    is_wrong = (labels != ignore_index) & ((labels < 0) | (labels >= num_classes))
    return DataError(
        f"targets have the class {int(labels[is_wrong][0])}, but the model has {num_classes} outputs, counted from 0; "
        f"give it one per class, or use {IGNORE_INDEX} where a target is missing"
    )


def sum_classes(total: Tensor, y: Tensor, labels: Tensor, weights: Tensor | None, ignore_index: int) -> LossSum:
    """Return a loss of classes with its counts; `y` is `[targets, classes]`, `weights` has one number per class."""
    # Not `y[is_valid]`: on an accelerator, the host would wait for the number of valid targets.
    is_valid = labels != ignore_index
    weight = None
    if weights is not None:
        weight = weights.index_select(0, labels.where(is_valid, 0)).where(is_valid, 0.0).sum()
    if torch.is_grad_enabled():
        return LossSum(total, is_valid.sum(), weight=weight)
    is_correct = (y.argmax(dim=-1) == labels) & is_valid
    return LossSum(total, is_valid.sum(), is_correct.sum(), weight)


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
class HuberLoss:
    """Huber loss: half the squared error up to `delta`, linear beyond; NaN targets are ignored. Equal shapes."""

    delta: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.delta < torch.inf:
            raise ConfigError(f"delta={self.delta} must be above 0; use a value such as 1.0")

    def __call__(self, y: Tensor, targets: Tensor) -> LossSum:
        error, count = _error(y, targets)
        return LossSum(F.huber_loss(error, torch.zeros_like(error), reduction="sum", delta=self.delta), count)


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """Cross-entropy of yes-or-no targets, several per time step or row: 0, 1, or a probability; NaN is ignored.

    Outputs are logits, of the same shape as the targets. In evaluations, correct predictions are counted.
    """

    def __call__(self, y: Tensor, targets: Tensor) -> LossSum:
        y = full_precision(y)
        is_missing, targets = split_missing(y, targets)
        losses = F.binary_cross_entropy_with_logits(y, targets, reduction="none").masked_fill(is_missing, 0.0)
        count = (~is_missing).sum()
        if torch.is_grad_enabled():
            return LossSum(losses.sum(), count)
        is_correct = ((y > 0) == (targets > 0.5)) & ~is_missing
        return LossSum(losses.sum(), count, is_correct.sum())


@dataclass(frozen=True)
class QuantileLoss:
    """Pinball loss for several quantiles; NaN targets are ignored. Each target counts once per quantile.

    With targets `[..., values]`, outputs are `[..., values * quantiles]` (the quantiles of a value are next to each
    other) or `[..., values, quantiles]`.
    """

    quantiles: tuple[float, ...] = (0.1, 0.5, 0.9)

    def __post_init__(self) -> None:
        if not self.quantiles or not all(0 < quantile < 1 for quantile in self.quantiles):
            raise ConfigError(
                f"quantiles={self.quantiles} are not all between 0 and 1; use values such as 0.1, 0.5, 0.9"
            )

    def __call__(self, y: Tensor, targets: Tensor) -> LossSum:
        y = self._by_quantile(y, targets)
        error, count = _error(y, targets.unsqueeze(-1).expand_as(y))
        # One quantile at a time: a tensor of all quantiles would have to be copied to the device.
        losses = [
            torch.maximum(quantile * part, (quantile - 1) * part).sum()
            for quantile, part in zip(self.quantiles, error.unbind(-1), strict=True)
        ]
        return LossSum(torch.stack(losses).sum(), count)

    def coverage(self, y: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many targets lie between the lowest and the highest quantile, and how many there are.

        If the model is right, their ratio is the difference of these quantiles: 0.8 for 0.1 and 0.9.
        """
        y = self._by_quantile(y, targets)
        # A comparison with NaN, a missing target, is false.
        is_covered = (y.amin(dim=-1) <= targets) & (targets <= y.amax(dim=-1))
        return is_covered.sum(), (~targets.isnan()).sum()

    def _by_quantile(self, y: Tensor, targets: Tensor) -> Tensor:
        """Return the outputs as `[..., values, quantiles]`."""
        num_quantiles = len(self.quantiles)
        if targets.shape and y.shape == (*targets.shape[:-1], targets.shape[-1] * num_quantiles):
            y = y.reshape(*targets.shape, num_quantiles)
        if y.shape != (*targets.shape, num_quantiles):
            raise ConfigError(
                f"outputs {list(y.shape)} don't have {num_quantiles} quantiles for each of the targets "
                f"{list(targets.shape)}; give the last block {num_quantiles} outputs per value"
            )
        return y


def _find_missing(y: Tensor, targets: Tensor) -> Tensor:
    """Return which targets are missing; raise unless there is one for each output."""
    if y.shape != targets.shape:
        raise ConfigError(f"outputs {list(y.shape)} and targets {list(targets.shape)} differ in shape; make them equal")
    return targets.isnan()


def split_missing(y: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return which targets are missing, and the targets in the dtype of `y`, with 0 for missing ones."""
    is_missing = _find_missing(y, targets)
    return is_missing, targets.to(y.dtype).masked_fill(is_missing, 0.0)


def _error(y: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return `targets - y`, with zeros (and no gradient) for missing targets, and the number of valid targets."""
    is_missing, y = _find_missing(y, targets), full_precision(y)
    # Not a product with a mask: NaN times zero is NaN, in forward and backward.
    error = (targets.to(y.dtype) - y).masked_fill(is_missing, 0.0)
    return error, (~is_missing).sum()
