"""ClassMetric: metrics of classes, from how often each class was predicted, was right and was the target."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.train.metrics.class_table import ClassTable
from stretto.train.metrics.metric_input import MetricInput
from stretto.train.metrics.sum_metric import StepMetric


class ClassMetric(StepMetric):
    """Counts correct predictions, predictions and targets of each class; `compute` turns the table into a result."""

    def __init__(
        self,
        num_classes: int,
        compute: Callable[[ClassTable], float | ClassTable],
        device: torch.device,
        class_names: Sequence[str] = (),
    ) -> None:
        super().__init__(3 * num_classes, device)
        self._num_classes, self._compute, self._class_names = num_classes, compute, class_names

    def add(self, metric_input: MetricInput) -> None:
        outputs, targets = metric_input.outputs, metric_input.targets
        if outputs.shape[:-1] != targets.shape:
            raise ConfigError(
                f"metrics of classes need outputs [n, classes] and targets [n], not {list(outputs.shape)} and "
                f"{list(targets.shape)}; write a function for them"
            )
        predicted = metric_input.predicted
        is_correct = (predicted == targets) & ~metric_input.is_missing
        parts = [(targets, is_correct), (predicted, ~metric_input.is_missing), (targets, ~metric_input.is_missing)]
        self.sums += torch.cat([self._count(classes, is_counted) for classes, is_counted in parts])

    def result(self, sums: Sequence[float]) -> float | ClassTable:
        return self._compute(ClassTable.of(sums, self._class_names))

    def _count(self, classes: Tensor, is_counted: Tensor) -> Tensor:
        """Return how often each class is counted."""
        # Not `classes[is_counted]`: on an accelerator, the host would wait. What does not count goes to a last element.
        # So does a class that the data does not have, which a model with more outputs may predict.
        indices = classes.where(is_counted, self._num_classes).clamp(max=self._num_classes).flatten()
        counts = torch.zeros(self._num_classes + 1, dtype=torch.int64, device=classes.device)
        return counts.index_add_(0, indices, torch.ones_like(indices))[:-1]
