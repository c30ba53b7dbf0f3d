"""The [logging] section: experiment trackers that a run reports to, in addition to its own log file."""

from typing import Annotated

from pydantic import Field

from stretto.base.strict_model import StrictModel

Name = Annotated[str, Field(min_length=1)]


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
