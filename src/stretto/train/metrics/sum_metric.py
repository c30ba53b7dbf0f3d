"""SumMetric: a metric that is computed from sums over all targets, so that any split of the data gives the same."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stretto.base.errors import ConfigError, StrettoError
from stretto.base.reason import class_and_reason
from stretto.train.metrics.class_table import ClassTable
from stretto.train.metrics.metric_input import MetricInput

MetricFunction = Callable[[Tensor, Tensor], tuple[Tensor | float, Tensor | float]]
"""A metric of the user: a function `(outputs, targets) -> (sum, count)`, whose metric is the sum over the count.

It gets only time steps with a target: outputs `[n, classes]` and targets `[n]`, or both `[n, values]`, with NaN where
some values of a time step are missing.
"""

_REMEDY = "return two numbers, a sum over the targets and what to divide it by, such as their count, and not a mean"
_TOLERANCE = 1e-3


class SumMetric(ABC):
    """A metric with sums of outputs and targets; `sums` over all ranks give the result."""

    def __init__(self, num_sums: int, device: torch.device) -> None:
        self.sums = torch.zeros(num_sums, dtype=torch.float64, device=device)

    @abstractmethod
    def result(self, sums: Sequence[float]) -> float | ClassTable:
        """Return the result from `sums` over all ranks."""


class StepMetric(SumMetric):
    """A metric that compares the outputs and targets of single time steps."""

    @abstractmethod
    def add(self, metric_input: MetricInput) -> None:
        """Add the sums of some outputs and targets."""


class MeanAbsoluteError(StepMetric):
    """The mean absolute error over all values that are not missing."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(2, device)

    def add(self, metric_input: MetricInput) -> None:
        outputs, targets = metric_input.outputs, metric_input.targets
        if outputs.shape != targets.shape:
            raise ConfigError(
                f"the metric mae needs an output for each value, not outputs {list(outputs.shape[1:])} and targets "
                f"{list(targets.shape[1:])} per time step; leave it out, or write a function for it"
            )
        errors = (outputs - targets).abs().masked_fill(metric_input.is_missing, 0.0)
        self.sums += torch.stack([errors.double().sum(), (~metric_input.is_missing).sum().double()])

    def result(self, sums: Sequence[float]) -> float:
        return _divide(*sums)


class FunctionMetric(StepMetric):
    """A metric of the user, from a function that returns two sums."""

    def __init__(self, name: str, function: MetricFunction, device: torch.device) -> None:
        super().__init__(2, device)
        self._name, self._function = name, function
        self._is_checked = False

    def add(self, metric_input: MetricInput) -> None:
        outputs, targets = metric_input.present
        num_rows = len(targets)
        if not num_rows:
            return
        sums = self._call(outputs, targets)
        if not self._is_checked and num_rows > 1:
            # Parts of different sizes, because errors of two equal parts could cancel out.
            cut = max(1, num_rows // 3)
            parts = self._call(outputs[:cut], targets[:cut]) + self._call(outputs[cut:], targets[cut:])
            self._check_sum(parts.tolist(), sums.tolist())
            self._is_checked = True
        self.sums += sums

    def result(self, sums: Sequence[float]) -> float:
        return _divide(*sums)

    def _call(self, outputs: Tensor, targets: Tensor) -> Tensor:
        try:
            result: object = self._function(outputs, targets)
        except StrettoError:
            raise
        except Exception as error:
            raise metric_failure(self._name, outputs, targets, error) from error
        if isinstance(result, tuple | list) and len(result) == 2:
            numbers = [torch.as_tensor(number, dtype=torch.float64, device=self.sums.device) for number in result]
            if all(number.numel() == 1 for number in numbers):
                return torch.stack([number.reshape(()) for number in numbers])
        raise ConfigError(f"metrics['{self._name}'] returned {_describe(result)}; {_REMEDY}")

    def _check_sum(self, parts: Sequence[float], whole: Sequence[float]) -> None:
        for part, total in zip(parts, whole, strict=True):
            if math.isfinite(total) and not math.isclose(part, total, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
                raise ConfigError(
                    f"metrics['{self._name}'] is not a sum: two parts of the data give {part:.6g} together, the whole "
                    f"{total:.6g}; {_REMEDY}"
                )


def metric_failure(name: str, outputs: Tensor, targets: Tensor, error: Exception) -> ConfigError:
    """Return the error for a metric that raised one."""
    shapes = f"outputs {list(outputs.shape)} and targets {list(targets.shape)}"
    return ConfigError(
        f"metrics['{name}'] failed on {shapes} ({class_and_reason(error)}); use a metric for such targets"
    )


def _divide(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def _describe(result: object) -> str:
    if isinstance(result, torch.Tensor):
        return f"a Tensor of shape {list(result.shape)}"
    if isinstance(result, tuple | list):
        kinds = ", ".join(_describe(item) if isinstance(item, torch.Tensor) else repr(item)[:40] for item in result)
        return f"({kinds})"
    return f"an object of type {type(result).__name__}"
