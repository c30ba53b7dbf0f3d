"""as_loss: turns torch's own loss modules into losses that return a sum and a count; refuses what returns a mean."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.base.device_constant import DeviceConstant
from stretto.base.errors import ConfigError
from stretto.base.window import IGNORE_INDEX
from stretto.blocks.head_loss import HeadLoss
from stretto.blocks.losses import (
    AbsoluteError,
    BinaryCrossEntropy,
    CrossEntropy,
    HuberLoss,
    Loss,
    LossSum,
    QuantileLoss,
    SquaredError,
    full_precision,
    split_missing,
    sum_classes,
    wrong_class_error,
)
from stretto.blocks.row_loss import RowLoss

_OWN_LOSSES = (AbsoluteError, BinaryCrossEntropy, CrossEntropy, HuberLoss, QuantileLoss, SquaredError)
# Modules whose loss is one number per element of outputs and targets of the same shape.
_ELEMENTWISE = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCEWithLogitsLoss,
    nn.BCELoss,
    nn.PoissonNLLLoss,
    nn.SoftMarginLoss,
)
_REMEDY = "return stretto.nn.LossSum(total, count), the sum over all targets and their number, not a mean"


def as_loss(loss: Loss | nn.Module) -> Loss:
    """Return a loss for the engines: torch's loss modules, such as `nn.MSELoss()`, become a sum and a count.

    As with torch's `reduction="mean"`, a step's loss and gradient are those of the mean over all targets of the global
    batch, without missing ones (NaN, or the ignore index). Tensors are time-major, and classes are the last dim.
    """
    if isinstance(loss, (*_OWN_LOSSES, HeadLoss, RowLoss, _CheckedLoss, _ElementwiseLoss, _LogProbabilityLoss)):
        return loss
    if isinstance(loss, type) and issubclass(loss, (nn.Module, *_OWN_LOSSES)):
        raise ConfigError(f"loss={loss.__name__} is a class; create it: {loss.__name__}()")
    if isinstance(loss, nn.Module) and type(loss).__module__ == nn.MSELoss.__module__:  # not a user's subclass
        return _wrap(loss)
    if getattr(loss, "__module__", None) == "torch.nn.functional":
        name = getattr(loss, "__name__", "")
        raise ConfigError(f"loss={name} returns a mean or a Tensor; use the module for it, such as nn.MSELoss()")
    if not callable(loss):
        raise ConfigError(f"loss is an object of type {type(loss).__name__}, not a function; {_REMEDY}")
    checked = _CheckedLoss(loss)
    checked.try_out()
    return checked


def loss_module(loss: Loss | nn.Module) -> nn.Module | None:
    """Return the module that a user's loss, or a loss over whole rows, consists of; None if it is no module."""
    module = loss.loss if isinstance(loss, _CheckedLoss) else loss
    return module if isinstance(module, nn.Module) else None


def mark_ignored(loss: Loss, targets: Tensor) -> Tensor:
    """Return the targets with IGNORE_INDEX for those that a loss ignores because of its own `ignore_index`."""
    ignore_index = loss.ignore_index if isinstance(loss, CrossEntropy | _LogProbabilityLoss) else IGNORE_INDEX
    return targets if ignore_index == IGNORE_INDEX else targets.masked_fill(targets == ignore_index, IGNORE_INDEX)


def _wrap(module: nn.Module) -> Loss:
    name = type(module).__name__
    if getattr(module, "reduction", None) == "sum":
        raise ConfigError(
            f"{name} has reduction='sum', but a step's loss is the mean over all targets of the global batch; use "
            "reduction='mean'"
        )
    if type(module) is nn.CrossEntropyLoss:
        weights = () if module.weight is None else tuple(module.weight.tolist())
        return CrossEntropy(weights, module.label_smoothing, module.ignore_index)
    if type(module) is nn.NLLLoss:
        constant = None if module.weight is None else DeviceConstant(tuple(module.weight.tolist()))
        return _LogProbabilityLoss(constant, module.ignore_index)
    if type(module) in _ELEMENTWISE:
        module = copy.deepcopy(module)
        setattr(module, "reduction", "none")  # noqa: B010 - nn.Module does not declare it
        return _ElementwiseLoss(module)
    if type(module) is nn.CTCLoss:
        raise ConfigError("loss=CTCLoss is torch's, which does not see whole rows here; use stretto.nn.CTCLoss()")
    names = ", ".join(kind.__name__ for kind in (nn.CrossEntropyLoss, nn.NLLLoss, *_ELEMENTWISE))
    raise ConfigError(f"loss={name} is not one of {names}; write a function of outputs and targets, and {_REMEDY}")


@dataclass(frozen=True)
class _ElementwiseLoss:
    """A torch module with one loss per element."""

    module: nn.Module  # with reduction="none"

    def __call__(self, y: Tensor, targets: Tensor) -> LossSum:
        y = full_precision(y)
        for buffer in self.module.buffers():
            if buffer.device != y.device:  # at most once: its weights then stay there
                # They outlive an evaluation in inference mode, whose tensors training could not use.
                with torch.inference_mode(False):
                    self.module.to(y.device)
        is_missing, targets = split_missing(y, targets)
        losses = self.module(y, targets).masked_fill(is_missing, 0.0)
        return LossSum(losses.sum(), (~is_missing).sum())


@dataclass(frozen=True)
class _LogProbabilityLoss:
    """`nn.NLLLoss`: the negative log-probability of classes, from outputs that are logarithms of probabilities."""

    class_weights: DeviceConstant | None
    ignore_index: int

    def __call__(self, y: Tensor, targets: Tensor) -> LossSum:
        y, labels = full_precision(y).flatten(0, -2), targets.flatten()
        if self.ignore_index != IGNORE_INDEX:  # padding is always IGNORE_INDEX
            labels = labels.masked_fill(labels == IGNORE_INDEX, self.ignore_index)
        weights = None if self.class_weights is None else self.class_weights.like(y)
        try:
            total = F.nll_loss(y, labels, weights, ignore_index=self.ignore_index, reduction="sum")
        except IndexError as error:
            raise wrong_class_error(labels, y.shape[-1], self.ignore_index) from error
        return sum_classes(total, y, labels, weights, self.ignore_index)


@dataclass(frozen=True)
class _CheckedLoss:
    """A user's loss; raises an error unless it returns a LossSum."""

    loss: Callable[[Tensor, Tensor], object]

    def __call__(self, y: Tensor, targets: Tensor) -> LossSum:
        return self.check(self.loss(y, targets))

    def check(self, result: object) -> LossSum:
        """Return a result of the loss; raise unless it is a LossSum."""
        if isinstance(result, LossSum):
            return result
        name = getattr(self.loss, "__name__", type(self.loss).__name__)
        raise ConfigError(f"the loss {name} returned an object of type {type(result).__name__}; {_REMEDY}")

    def try_out(self) -> None:
        """Call the loss on a few numbers; raise if it returns something, but not a LossSum.

        If it fails on all of them, it needs other shapes, and its result is checked in the first step.
        """
        for width in (1, 4):
            y = torch.zeros(2, 2, width)
            for targets in (y, y[..., 0], torch.zeros(2, 2, dtype=torch.int64)):
                try:
                    with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        result = self.loss(y, targets)
                except Exception:  # noqa: BLE001 - whatever it raises on numbers that are not the data's
                    continue
                self.check(result)
                return
