"""What a config makes stretto run, contact, or write outside of the run's folder: the table in SECURITY.md."""

from collections.abc import Iterator

from stretto.base.redact import without_secrets
from stretto.base.remote import is_remote
from stretto.config.run import RunConfig

_RUNS_CODE = "imports and runs Python code"  # if the value is `file.py:name` or `package.module:name`
_READS_URL = "reads from a server, with your credentials"  # if the value is a URL
EFFECTS = {
    "model.factory": _RUNS_CODE,
    "model.loss": _RUNS_CODE,
    "metrics.names": _RUNS_CODE,
    "data.factory": _RUNS_CODE,
    "data.train": _READS_URL,
    "data.valid": _READS_URL,
    "data.cache": "writes data and profiles to a folder",
    "save.to": "writes and deletes checkpoints in a folder, or on a server with your credentials",
    "logging.wandb_project": "sends the config and the log to Weights & Biases, if you are logged in",
    "logging.mlflow_experiment": "sends the config and the log to the server in MLFLOW_TRACKING_URI, if that is set",
    "logging.prometheus_port": "serves the log's numbers on 127.0.0.1",
    "logging.otlp_endpoint": "sends the log's numbers to a server",
}


def used_effects(config: RunConfig) -> Iterator[str]:
    """Yield a line for each effect that a config has, such as `model.factory = 'x:y' imports and runs Python code`."""
    for name, value in _used_values(config):
        yield f"{name} = {without_secrets(value)!r} {EFFECTS[name]}"


def used_code(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the Python code that a config names, each time with the name of the field before it."""
    return ((name, value) for name, value in _used_values(config) if EFFECTS[name] == _RUNS_CODE)


def _used_values(config: RunConfig) -> Iterator[tuple[str, str]]:
    for name, effect in EFFECTS.items():
        section, _, field = name.partition(".")
        settings = getattr(config, section)
        values = getattr(settings, field)
        if values == type(settings).model_fields[field].default:
            continue
        for value in map(str, values if isinstance(values, tuple) else (values,)):
            if (effect != _RUNS_CODE or ":" in value) and (effect != _READS_URL or is_remote(value)):
                yield name, value
