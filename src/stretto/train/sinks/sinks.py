"""Sinks: opens, writes to and closes the trackers that a config names."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Self

from stretto.base.errors import ConfigError, StrettoError
from stretto.base.extras import install_command, is_installed
from stretto.config.logging import LoggingConfig
from stretto.train.node_report import NodeReport
from stretto.train.sinks.background import BackgroundSink, describe_error
from stretto.train.sinks.sink import NODE, LogLine, RunStatus, Sink

# The pip extra that each field of LoggingConfig needs, and a module of it. Sinks are opened in this order: those that
# fail most often first, the slowest last.
_EXTRAS = {
    "prometheus_port": ("prometheus", "prometheus_client"),
    "otlp_endpoint": ("otel", "opentelemetry.exporter.otlp.proto.http"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "mlflow_experiment": ("mlflow", "mlflow"),
    "wandb_project": ("wandb", "wandb"),
}


class Sinks:
    """The sinks of a run, one per tracker, each with a thread. A sink's first error is logged; the run continues."""

    def __init__(self, sinks: Sequence[BackgroundSink]) -> None:
        self._sinks = sinks

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(run_status(error))

    def write(self, kind: str, values: Mapping[str, object]) -> None:
        """Queue a line for all sinks, without waiting."""
        for sink in self._sinks:
            sink.write(kind, values)

    def write_node(self, report: NodeReport) -> None:
        """Queue a report on the node of rank 0, for sinks that have metrics of nodes."""
        for sink in self._sinks:
            if sink.is_per_node:
                sink.write(NODE, asdict(report))

    def close(self, status: RunStatus = "finished") -> None:
        """Wait until all lines are written, for a limited time per sink; `status` is how the run ended."""
        for sink in self._sinks:
            sink.close(status)


def check_sinks(config: LoggingConfig) -> None:
    """Raise if a sink's package is not installed."""
    for name, value in _enabled(config):
        extra, module = _EXTRAS[name]
        if not is_installed(module):
            remedy = f"{install_command(extra)}, or leave it out"
            raise ConfigError(f"logging.{name}={value} needs {module}; {remedy}")


def check_node_sinks(config: LoggingConfig) -> None:
    """Raise if the package of a sink that ranks other than rank 0 use is not installed."""
    check_sinks(LoggingConfig(otlp_endpoint=config.otlp_endpoint))


def open_sinks(
    config: LoggingConfig,
    folder: Path | str,
    *,
    step: int = 0,
    hyperparameters: Mapping[str, object] | None = None,
    history: Callable[[], Iterable[LogLine]] = tuple,  # by default, no lines
) -> Sinks:
    """Open the sinks of the config's trackers; they continue after `step`. Call it on the first rank only.

    Trackers keep their files in the folder, so that a later launch can continue them. `history` returns the log's
    lines up to `step`, for trackers that need them again. MLflow and W&B show the `hyperparameters`.
    """
    check_sinks(config)
    folder, hyperparameters = Path(folder), hyperparameters or {}
    sinks: list[BackgroundSink] = []
    for name, value in _enabled(config):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            sinks.append(BackgroundSink(name, _open_sink(name, config, folder, step, hyperparameters), history()))
        except Exception as error:
            Sinks(sinks).close("failed")
            if isinstance(error, StrettoError):
                raise
            raise ConfigError(
                f"logging.{name}={value} can't be opened ({describe_error(error)}); fix the cause, or leave it out"
            ) from error
    return Sinks(sinks)


def run_status(error: BaseException | None) -> RunStatus:
    """Return how a run ended that raised this error, or none."""
    if error is None:
        return "finished"
    # KeyboardInterrupt and GeneratorExit are requests to stop, not failures.
    is_requested = not isinstance(error, Exception)
    is_temporary = isinstance(error, StrettoError) and error.exit_code == os.EX_TEMPFAIL
    return "interrupted" if is_requested or is_temporary else "failed"


def _enabled(config: LoggingConfig) -> list[tuple[str, object]]:
    return [(name, value) for name in _EXTRAS if (value := getattr(config, name)) not in (None, False)]


def _open_sink(
    name: str, config: LoggingConfig, folder: Path, step: int, hyperparameters: Mapping[str, object]
) -> Sink:
    # The imports are here because trackers are optional, and slow to import.
    if name == "prometheus_port":
        from stretto.train.sinks.prometheus import PrometheusSink

        assert config.prometheus_port is not None
        return PrometheusSink(config.prometheus_port, folder)
    if name == "otlp_endpoint":
        from stretto.train.sinks.otel import OtelSink

        assert config.otlp_endpoint is not None
        return OtelSink(config.otlp_endpoint, folder)
    if name == "tensorboard":
        from stretto.train.sinks.tensorboard import TensorBoardSink

        return TensorBoardSink(folder / "tensorboard", step)
    if name == "mlflow_experiment":
        from stretto.train.sinks.mlflow import MlflowSink

        assert config.mlflow_experiment is not None
        return MlflowSink(config.mlflow_experiment, folder, hyperparameters)
    from stretto.train.sinks.wandb import WandbSink

    assert config.wandb_project is not None
    return WandbSink(config.wandb_project, folder, hyperparameters)
