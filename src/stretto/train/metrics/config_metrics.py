"""The metrics that a config names, and the one that the run monitors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from stretto.base.device_constant import DeviceConstant
from stretto.base.errors import ConfigError
from stretto.base.metric_names import BUILT_IN_METRICS, PER_CLASS, SCORE_MODES
from stretto.base.score import Score, ScoreMode
from stretto.base.task import Task, has_own_length
from stretto.blocks.losses import QuantileLoss
from stretto.config.model import ModelConfig
from stretto.config.run import MetricsConfig
from stretto.train.evaluate import Evaluation
from stretto.train.metrics.metric_totals import check_metrics
from stretto.train.metrics.sum_metric import MetricFunction
from stretto.train.metrics.torch_metric import is_torchmetrics
from stretto.train.user_code import load_object


@dataclass(frozen=True)
class RunMetrics:
    """The metrics of a run's evaluations, and the one that decides which evaluation is better."""

    metrics: Mapping[str, object] = field(default_factory=dict)  # for `evaluate`
    monitor: str = "loss"
    mode: ScoreMode = "min"

    def score(self, evaluation: Evaluation) -> Score:
        """Return the monitored metric of an evaluation."""
        scores = {"loss": evaluation.loss, **evaluation.scores}
        if self.monitor not in scores:
            raise ConfigError(
                f"metrics.monitor={self.monitor!r} is not a metric of this run's evaluations; choose from "
                f"{', '.join(scores)}"
            )
        return Score(scores[self.monitor], self.monitor, self.mode)


def load_metrics(config: MetricsConfig, model: ModelConfig, task: Task, target_std: Sequence[float] = ()) -> RunMetrics:
    """Return the metrics that a config names; raise if one is unknown or does not fit the targets.

    Values to predict are divided by `target_std`; the mean absolute error is in their original units. A model of
    quantiles also has the metric `coverage`.
    """
    metrics: dict[str, object] = {}
    for spec in config.names:
        metrics[spec.rpartition(":")[2]] = spec if spec in BUILT_IN_METRICS else load_object("metrics.names", spec)
    check_metrics(metrics, task)
    _check_monitor(config.monitor, [*metrics], model, task)
    mode = _monitor_mode(config, metrics.get(config.monitor))
    quantiles = model.predicted_quantiles
    if "mae" in config.names and (quantiles or target_std):
        metrics["mae"] = _absolute_error(quantiles, target_std)
    if len(quantiles) > 1:
        metrics.setdefault("coverage", QuantileLoss(quantiles).coverage)
    return RunMetrics(metrics, config.monitor, mode)


def _check_monitor(monitor: str, names: Sequence[str], model: ModelConfig, task: Task) -> None:
    """Raise if the evaluations can't have the metric that the run monitors."""
    possible = ["loss", *(["perplexity", "bits_per_byte"] if task.targets == "next_token" else [])]
    # A user's own loss may count correct predictions.
    if (task.has_classes and not has_own_length(task.targets)) or model.has_own_loss:
        possible.append("accuracy")
    possible = list(dict.fromkeys([*possible, *names]))
    if monitor not in possible:
        raise ConfigError(
            f"metrics.monitor={monitor!r} is not a metric of the evaluations of {task.targets}; choose from "
            f"{', '.join(name for name in possible if name != PER_CLASS)}"
        )


def _absolute_error(quantiles: Sequence[float], target_std: Sequence[float]) -> MetricFunction:
    """Return the mean absolute error as a metric: that of the quantile 0.5 if there are quantiles."""
    if quantiles and 0.5 not in quantiles:
        raise ConfigError(
            f"metrics.names='mae' needs the median, but model.quantiles={list(quantiles)} has no 0.5; add it, or leave "
            "mae out"
        )
    index = quantiles.index(0.5) if quantiles else 0
    scale = DeviceConstant(tuple(target_std) or (1.0,))

    def sum_errors(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        # The quantiles of a value are next to each other.
        errors = (outputs[:, index :: len(quantiles) or 1] - targets).abs() * scale.like(outputs)
        return errors.masked_fill(targets.isnan(), 0.0).sum(), (~targets.isnan()).sum()

    return sum_errors


def _monitor_mode(config: MetricsConfig, metric: object) -> ScoreMode:
    if config.mode is not None:
        return config.mode
    if config.monitor in SCORE_MODES and (metric is None or isinstance(metric, str)):
        return SCORE_MODES[config.monitor]
    is_higher_better: bool | None = cast(Any, metric).higher_is_better if is_torchmetrics(metric) else None
    if is_higher_better is None:
        raise ConfigError(
            f"metrics.monitor={config.monitor!r} is your own metric, which does not say whether lower or higher is "
            "better; set metrics.mode to min or max"
        )
    return "max" if is_higher_better else "min"
