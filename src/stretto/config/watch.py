"""The watch section: where a run is watched from, besides its own log."""

from typing import Annotated

from pydantic import Field

from stretto.base.strict_model import StrictModel

Name = Annotated[str, Field(min_length=1)]


class WatchConfig(StrictModel):
    """What else is fed the lines of the log; each is an extra to install, and may change whenever the run goes on."""

    tensorboard: bool = False
    """Write them for TensorBoard, into `tensorboard` in the run's folder."""
    wandb: Name | None = None
    """Project of Weights & Biases; files go into the run's folder and nowhere else unless WANDB_MODE says so."""
    mlflow: Name | None = None
    """Experiment of MLflow, in the run's folder, or at MLFLOW_TRACKING_URI if that is set."""
    prometheus: int | None = Field(None, ge=1, le=65535)
    """Port on 127.0.0.1 where Prometheus finds the newest figures."""
