"""The metrics that a config names, and the one that the run monitors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from stretto.base.errors import ConfigError
from stretto.base.metric_names import BUILT_IN_METRICS, SCORE_MODES
from stretto.base.score import Score, ScoreMode
from stretto.base.task import Task
from stretto.config.run import MetricsConfig
from stretto.train.evaluate import Evaluation
from stretto.train.metrics.metric_totals import check_metrics
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


def load_metrics(config: MetricsConfig, task: Task) -> RunMetrics:
    """Return the metrics that a config names; raise if one is unknown or does not fit the targets."""
    metrics: dict[str, object] = {}
    for spec in config.names:
        metrics[spec.rpartition(":")[2]] = spec if spec in BUILT_IN_METRICS else load_object("metrics.names", spec)
    check_metrics(metrics, task)
    return RunMetrics(metrics, config.monitor, _monitor_mode(config, metrics.get(config.monitor)))


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
