"""The [logging] section: experiment trackers that a run reports to, in addition to its own log file."""

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from stretto.base.strict_model import StrictModel

Name = Annotated[str, Field(min_length=1)]
AUTO = "auto"  # as `otlp_endpoint`: what the environment says


class LoggingConfig(StrictModel):
    """Experiment trackers that get the numbers in log.jsonl. Each needs a pip extra. You can change them on resume."""

    tensorboard: bool = False
    """Write event files to the folder `tensorboard` in the run's folder."""
    wandb_project: Name | None = None
    """Weights & Biases project; logs to its server if you are logged in (`wandb login`), else offline, to the run's
    folder. WANDB_MODE says otherwise."""
    mlflow_experiment: Name | None = None
    """MLflow experiment; logs to the run's folder, or to MLFLOW_TRACKING_URI if that is set."""
    prometheus_port: int | None = Field(None, ge=1, le=65535)
    """Port on 127.0.0.1 where Prometheus can scrape the latest values."""
    otlp_endpoint: str | None = None
    """OpenTelemetry collector that each node pushes metrics to, over OTLP/HTTP: a URL such as `http://collector:4318`,
    or `auto` for OTEL_EXPORTER_OTLP_ENDPOINT or, without that, `http://localhost:4318`. Headers, certificates and the
    interval are those in the standard variables, such as OTEL_EXPORTER_OTLP_HEADERS."""

    @field_validator("otlp_endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str | None) -> str | None:
        if endpoint is None or endpoint == AUTO:
            return endpoint
        try:
            url = urlsplit(endpoint)
            is_url = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0  # raises if it is invalid
        except ValueError:
            is_url = False
        # The messages don't have the value, which may be a secret.
        if not is_url:
            raise ValueError(f"the endpoint is not a URL; use one such as http://collector:4318, or {AUTO}")
        if url.username is not None or url.password is not None or url.query or url.fragment:
            raise ValueError(
                "the endpoint has a user, a password or a query, which would be saved with the config; set "
                "OTEL_EXPORTER_OTLP_HEADERS instead"
            )
        return endpoint
