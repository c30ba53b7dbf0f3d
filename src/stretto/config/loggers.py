"""The logging section: which experiment trackers a run reports to, besides its own log."""

from typing import Annotated

from pydantic import Field

from stretto.base.strict_model import StrictModel

Name = Annotated[str, Field(min_length=1)]


class LoggingConfig(StrictModel):
    """Which trackers get the lines of the log. Each needs an extra package, and may change when a run resumes."""

    tensorboard: bool = False
    """Write event files for TensorBoard to `tensorboard` in the run's folder."""
    wandb: Name | None = None
    """Project of Weights & Biases; files stay in the run's folder unless WANDB_MODE says otherwise."""
    mlflow: Name | None = None
    """Experiment of MLflow, in the run's folder, or at MLFLOW_TRACKING_URI if that is set."""
    prometheus: int | None = Field(None, ge=1, le=65535)
    """Port on 127.0.0.1 where Prometheus can scrape the newest values."""
