"""TorchMetric: a metric of the package torchmetrics, whose states are gathered from the ranks that have outputs."""

import math
import sys
import warnings
from typing import Any

import torch
from torch import Tensor

from stretto.base.errors import ConfigError, StrettoError
from stretto.base.reason import class_and_reason
from stretto.mesh.all_gather import all_gather
from stretto.mesh.world import World
from stretto.train.metrics.metric_input import MetricInput
from stretto.train.metrics.sum_metric import metric_failure


def is_torchmetrics(value: object) -> bool:
    """Whether a value is a metric, a collection or a class of torchmetrics; never imports it."""
    package: Any = sys.modules.get("torchmetrics")
    if package is None:
        return False
    kinds = (package.Metric, package.MetricCollection)
    return isinstance(value, kinds) or (isinstance(value, type) and issubclass(value, kinds))


def check_torchmetrics(name: str, value: Any) -> None:  # noqa: ANN401 - torchmetrics may not be installed
    """Raise unless a value of torchmetrics can be used as a metric."""
    package: Any = sys.modules["torchmetrics"]
    if isinstance(value, type):
        raise ConfigError(f"metrics['{name}'] is a class; create it: {value.__name__}(...)")
    if isinstance(value, package.MetricCollection):
        raise ConfigError(f"metrics['{name}'] is a MetricCollection; pass its metrics: metrics={{**collection}}")
    if any(part is not value and isinstance(part, package.Metric) for part in value.modules()):
        raise ConfigError(f"metrics['{name}'] wraps other metrics, which can't be combined over ranks; use these")
    if not value.sync_on_compute:
        raise ConfigError(f"metrics['{name}'] has sync_on_compute=False, so it would be of one rank; leave it out")


class TorchMetric:
    """A copy of a torchmetrics metric for one evaluation; the user's own keeps its state."""

    def __init__(self, name: str, metric: Any, device: torch.device) -> None:  # noqa: ANN401
        self._name = name
        self._metric = metric.clone().to(device)
        self._metric.reset()
        self._has_input = False

    def add(self, metric_input: MetricInput) -> None:
        """Update the metric with the outputs (for classes, probabilities) and targets of time steps with a target."""
        outputs, targets = metric_input.present
        if not len(targets):
            return
        if targets.is_floating_point() and bool(targets.isnan().any()):
            raise ConfigError(
                f"metrics['{self._name}'] got a time step with some values missing, and torchmetrics can't leave these "
                "out; write a function that returns sums"
            )
        if metric_input.has_classes and outputs.dim() == 2 and outputs.shape[1] > 1:
            # torchmetrics takes outputs between 0 and 1 for probabilities, and others for logits, in each update anew:
            # by chance, all logits of a small chunk may be between 0 and 1.
            outputs = outputs.softmax(dim=1)
        try:
            self._metric.update(outputs, targets)
        except Exception as error:
            raise metric_failure(self._name, outputs, targets, error) from error
        self._has_input = True

    def result(self, world: World) -> float:
        """Return the metric of all ranks, on every rank; a collective."""
        self._check_states(world)
        if not any(world.all_reduce([float(self._has_input)])):
            return math.nan  # no rank has a target

        def gather(tensor: Tensor, group: object = None) -> list[Tensor]:
            # A rank without outputs, such as a first stage, has only initial states, which must not count.
            return all_gather(world, tensor if self._has_input else None)

        self._metric.dist_sync_fn = gather
        self._metric.distributed_available_fn = lambda: not world.is_single_rank
        value, problem = self._compute()
        # A rank without outputs may lack what `compute` needs besides the states, so only the others count.
        values = all_gather(world, torch.tensor([value], dtype=torch.float64) if self._has_input else None)
        text = torch.tensor([*problem.encode()], dtype=torch.uint8)
        problem = bytes(all_gather(world, text if self._has_input else None)[0].tolist()).decode()
        if problem:
            raise ConfigError(f"metrics['{self._name}'] {problem}")
        return float(values[0])

    def _compute(self) -> tuple[float, str]:
        """Return the result, or what is wrong with it."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a rank without outputs has no update
                result: object = self._metric.compute()
        except StrettoError:  # a lost rank
            raise
        except Exception as error:  # noqa: BLE001 - whatever torchmetrics raises
            return torch.nan, f"failed ({class_and_reason(error)}); use another metric"
        if isinstance(result, Tensor) and result.numel() == 1:
            return float(result), ""
        kind = f"a Tensor of shape {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        return torch.nan, f"computed {kind}, not one number; use its average='macro', or the metric per_class"

    def _check_states(self, world: World) -> None:
        """Raise on every rank if ranks have different numbers of states: gathering them would hang."""
        if world.is_single_rank:
            return
        num_states = 0

        def count(tensor: Tensor, group: object = None) -> list[Tensor]:
            nonlocal num_states
            num_states += 1
            return [tensor]

        self._metric.clone().sync(dist_sync_fn=count, distributed_available=lambda: True)
        (total,) = world.all_reduce([float(num_states)])
        (num_different,) = world.all_reduce([float(total != num_states * world.size)])
        if num_different:
            raise ConfigError(
                f"metrics['{self._name}'] has lists that can't be combined over ranks; use another metric"
            )
