"""MetricTotals: all metrics of one evaluation, on one rank."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.base.metric_names import (
    BUILT_IN_METRICS,
    CLASS_METRICS,
    ENTITY_F1,
    EVALUATION_FIELDS,
    PER_CLASS,
    ROW_METRICS,
    SYMBOL_METRICS,
)
from stretto.base.strict_model import suggest_name
from stretto.base.task import Task, has_classes, has_own_length
from stretto.mesh.world import World
from stretto.train.metrics.class_metric import ClassMetric
from stretto.train.metrics.class_table import ClassTable
from stretto.train.metrics.metric_input import MetricInput
from stretto.train.metrics.row_metric import RowMetric, make_row_metric
from stretto.train.metrics.sum_metric import FunctionMetric, MeanAbsoluteError, MetricFunction, StepMetric
from stretto.train.metrics.torch_metric import TorchMetric, check_torchmetrics, is_torchmetrics

Metrics = Mapping[str, object] | Sequence[str]
"""Metrics by name: the name of a built-in metric, a `MetricFunction`, or an object of torchmetrics; or only names."""

MetricResult = float | ClassTable

_MAX_TABLE_CLASSES = 1000

_FROM_TABLE: dict[str, Callable[[ClassTable], MetricResult]] = {
    "accuracy": lambda table: table.accuracy,
    "f1": lambda table: table.macro_f1,
    PER_CLASS: lambda table: table,
}


def metrics_by_name(metrics: Metrics) -> dict[str, object]:
    """Return metrics by name, also those of which only names are given."""
    if isinstance(metrics, str):
        metrics = [metrics]
    return dict(metrics) if isinstance(metrics, Mapping) else {name: name for name in metrics}


def check_metrics(metrics: Metrics, task: Task) -> None:
    """Raise if a metric is not known or does not fit the targets of a task; the same on every rank."""
    for name, metric in metrics_by_name(metrics).items():
        if not name or name in EVALUATION_FIELDS:
            raise ConfigError(f"metrics can't have the name {name!r}, which an evaluation uses; rename it")
        is_of_symbols = isinstance(metric, str) and (metric in SYMBOL_METRICS or metric not in BUILT_IN_METRICS)
        if has_own_length(task.targets) and not is_of_symbols:
            raise ConfigError(
                f"metrics['{name}'] compares outputs and targets of the same time step, but the data's targets are "
                f"{task.targets}; use {', '.join(SYMBOL_METRICS)}"
            )
        if isinstance(metric, str):
            _check_built_in(name, metric, task)
        elif is_torchmetrics(metric):
            check_torchmetrics(name, metric)
        elif not callable(metric):
            raise ConfigError(
                f"metrics['{name}'] is an object of type {type(metric).__name__}; use a built-in name "
                f"({', '.join(BUILT_IN_METRICS)}), a function, or a metric of torchmetrics"
            )


def _check_built_in(name: str, metric: str, task: Task) -> None:
    if metric not in BUILT_IN_METRICS:
        raise ConfigError(
            f"metrics['{name}']={metric!r} is not a built-in metric; {suggest_name(metric, BUILT_IN_METRICS)}"
        )
    if metric in SYMBOL_METRICS and not has_own_length(task.targets):
        raise ConfigError(
            f"metrics['{name}']={metric!r} is for a sequence of symbols per row, but the data's targets are "
            f"{task.targets}; leave it out"
        )
    if metric == ENTITY_F1 and task.targets != "class_per_step":
        raise ConfigError(
            f"metrics['{name}']={metric!r} is for a tag per time step, but the data's targets are {task.targets}; "
            "leave it out"
        )
    if metric not in ROW_METRICS and (metric in CLASS_METRICS) != has_classes(task.targets):
        remedy = "mae, or a function" if metric in CLASS_METRICS else "accuracy, f1 or per_class"
        kind = "classes" if metric in CLASS_METRICS else "values"
        raise ConfigError(
            f"metrics['{name}']={metric!r} is for {kind}, but the data's targets are {task.targets}; use {remedy}"
        )
    if metric == PER_CLASS and task.num_outputs > _MAX_TABLE_CLASSES:
        raise ConfigError(
            f"metrics['{name}']={metric!r} has a row for each class, and the data has {task.num_outputs:,}, more than "
            f"{_MAX_TABLE_CLASSES:,}; use f1"
        )


class MetricTotals:
    """Collects what metrics need from outputs and targets, on the ranks that have these; all ranks get the results."""

    def __init__(self, metrics: Metrics, task: Task, device: torch.device, class_names: Sequence[str] = ()) -> None:
        check_metrics(metrics, task)
        if class_names and task.has_classes and len(class_names) != task.num_outputs:
            raise ConfigError(
                f"class_names has {len(class_names)} names, but the data has {task.num_outputs} classes; give one name "
                "per class"
            )
        self._sum_metrics: dict[str, StepMetric | RowMetric] = {}
        self._torch_metrics: dict[str, TorchMetric] = {}
        self._names = list(metrics_by_name(metrics))
        self._device = device
        for name, metric in metrics_by_name(metrics).items():
            # Not `metric == "mae"` alone: `==` of a torchmetrics object makes another metric.
            if isinstance(metric, str) and metric == "mae":
                self._sum_metrics[name] = MeanAbsoluteError(device)
            elif isinstance(metric, str) and metric in ROW_METRICS:
                self._sum_metrics[name] = make_row_metric(name, metric, class_names, task.num_outputs)
            elif isinstance(metric, str):
                self._sum_metrics[name] = ClassMetric(task.num_outputs, _FROM_TABLE[metric], device, class_names)
            elif is_torchmetrics(metric):
                self._torch_metrics[name] = TorchMetric(name, cast(Any, metric), device)
            else:
                self._sum_metrics[name] = FunctionMetric(name, cast(MetricFunction, metric), device)

    def add(self, y: Tensor, targets: Tensor) -> None:
        """Add the outputs and targets of a chunk, both `[time, batch, ...]`; of CTC, symbols `[length, batch]`."""
        step_metrics: list[StepMetric | TorchMetric] = [*self._torch_metrics.values()]
        for metric in self._sum_metrics.values():
            if isinstance(metric, RowMetric):
                metric.add_rows(y, targets)
            else:
                step_metrics.append(metric)
        if step_metrics:
            metric_input = MetricInput.of(y, targets)
            for step_metric in step_metrics:
                step_metric.add(metric_input)

    @property
    def sums(self) -> Tensor:
        """The sums of this rank, a vector."""
        no_sums = torch.zeros(0, dtype=torch.float64, device=self._device)  # `cat` needs at least one tensor
        return torch.cat([no_sums, *(metric.sums.to(self._device) for metric in self._sum_metrics.values())])

    def results(self, sums: Sequence[float], world: World) -> dict[str, MetricResult]:
        """Return the results by name, from the sums over all ranks; a collective."""
        results: dict[str, MetricResult] = {}
        start = 0
        for name, metric in self._sum_metrics.items():
            stop = start + len(metric.sums)
            results[name] = metric.result(sums[start:stop])
            start = stop
        results |= {name: metric.result(world) for name, metric in self._torch_metrics.items()}
        return {name: results[name] for name in self._names}
