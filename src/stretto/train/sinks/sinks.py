"""Sinks: those that a config asks for, opened, fed and closed together."""

import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from stretto.base.errors import ConfigError, StrettoError
from stretto.config.watch import WatchConfig
from stretto.train.sinks.background import BackgroundSink, describe_error
from stretto.train.sinks.sink import LogLine, RunStatus, Sink


class Sinks:
    """All sinks of a run. Each is fed in the background; what goes wrong with one is said once, and ends nothing."""

    def __init__(self, sinks: Sequence[BackgroundSink]) -> None:
        self._sinks = sinks

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(_run_status(error))

    def write(self, kind: str, values: Mapping[str, object]) -> None:
        """Hand a line to all, without waiting for any."""
        for sink in self._sinks:
            sink.write(kind, values)

    def close(self, status: RunStatus = "finished") -> None:
        """Wait until all lines have arrived, and say how the run ended: `finished`, `failed`, or `interrupted` to go on."""
        for sink in self._sinks:
            sink.close(status)


def check_sinks(watch: WatchConfig) -> None:
    """Refuse a sink whose package is not installed."""
    for name, value in _enabled(watch):
        package = "prometheus_client" if name == "prometheus" else name
        found = importlib.util.find_spec(package)
        # A folder of that name beside the run is no package.
        if found is None or found.origin is None:
            raise ConfigError(f"watch.{name}={value} needs {package}; pip install 'stretto[{name}]', or leave it out")


def open_sinks(
    watch: WatchConfig,
    folder: Path | str,
    *,
    step: int = 0,
    hyperparameters: Mapping[str, object] | None = None,
    history: Callable[[], Iterable[LogLine]] = tuple,
) -> Sinks:
    """Open what a config asks for, to go on after a step; `hyperparameters` is what a tool should know of the run.

    What the tools keep goes into the folder, where a later start finds it and goes on. `history` gives the lines up to
    the step, for tools that need them again. Call it on the first rank only.
    """
    check_sinks(watch)
    folder, hyperparameters = Path(folder), hyperparameters or {}
    sinks: list[BackgroundSink] = []
    for name, value in _enabled(watch):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            sinks.append(BackgroundSink(name, _OPENERS[name](watch, folder, step, hyperparameters), history()))
        except Exception as error:
            Sinks(sinks).close("failed")
            if isinstance(error, StrettoError):
                raise
            raise ConfigError(
                f"watch.{name}={value} can't be opened ({describe_error(error)}); mend that, or leave it out"
            ) from error
    return Sinks(sinks)


def flatten(tree: Mapping[str, object]) -> dict[str, object]:
    """Return a config of sections as one table, by dotted names."""
    found: dict[str, object] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{below}": one for below, one in flatten(value).items()}
        else:
            found[name] = value
    return found


def _run_status(error: BaseException | None) -> RunStatus:
    if error is None:
        return "finished"
    # What is no Exception is a request to stop: Ctrl-C, or a loop that was left.
    is_asked = not isinstance(error, Exception)
    is_worth_another_try = isinstance(error, StrettoError) and error.exit_code == os.EX_TEMPFAIL
    return "interrupted" if is_asked or is_worth_another_try else "failed"


def _enabled(watch: WatchConfig) -> list[tuple[str, object]]:
    return [(name, value) for name in _OPENERS if (value := getattr(watch, name)) not in (None, False)]


def _open_prometheus(watch: WatchConfig, folder: Path, step: int, hyperparameters: Mapping[str, object]) -> Sink:
    from stretto.train.sinks.prometheus import PrometheusSink

    assert watch.prometheus is not None
    return PrometheusSink(watch.prometheus, folder)


def _open_tensorboard(watch: WatchConfig, folder: Path, step: int, hyperparameters: Mapping[str, object]) -> Sink:
    from stretto.train.sinks.tensorboard import TensorBoardSink

    return TensorBoardSink(folder / "tensorboard", step)


def _open_mlflow(watch: WatchConfig, folder: Path, step: int, hyperparameters: Mapping[str, object]) -> Sink:
    from stretto.train.sinks.mlflow import MlflowSink

    assert watch.mlflow is not None
    return MlflowSink(watch.mlflow, folder, hyperparameters)


def _open_wandb(watch: WatchConfig, folder: Path, step: int, hyperparameters: Mapping[str, object]) -> Sink:
    from stretto.train.sinks.wandb import WandbSink

    assert watch.wandb is not None
    return WandbSink(watch.wandb, folder, hyperparameters)


# In this order: what is most often refused first, what takes longest last.
_OPENERS: dict[str, Callable[[WatchConfig, Path, int, Mapping[str, object]], Sink]] = {
    "prometheus": _open_prometheus,
    "tensorboard": _open_tensorboard,
    "mlflow": _open_mlflow,
    "wandb": _open_wandb,
}
