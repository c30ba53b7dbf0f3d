"""MLflow: logs to an MLflow run, which is stored in the run's folder or on the server at MLFLOW_TRACKING_URI."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from stretto.train.sinks.sink import RunStatus, Sink, iter_scalars, step_of
from stretto.train.sinks.state import SinkState

# MLflow's limits per request.
_MAX_METRICS, _MAX_PARAMETERS = 1000, 100
_STATUS: dict[RunStatus, str] = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class MlflowSink(Sink):
    """Logs metrics named `kind/name`. All launches of a run log to one MLflow run, whose id is in the run's folder.

    MLflow can't delete a metric, so a step that it already has is not written again.
    """

    needs_history = True

    def __init__(self, experiment: str, folder: Path, hyperparameters: Mapping[str, object]) -> None:
        # Otherwise MLflow sends telemetry.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        server = os.environ.get("MLFLOW_TRACKING_URI")
        if server is None:
            # Allow files: without this, MLflow accepts only a database or a server.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        self._client = MlflowClient(server or (folder.resolve() / "mlflow").as_uri())
        self._run_id = self._resume_run(experiment, folder) or self._create_run(experiment, folder, hyperparameters)
        metrics = self._client.get_run(self._run_id).data.metrics
        # The step of each line is a metric too, `kind/step`; its value is the last step that earlier launches logged.
        self._last_steps = {
            name.removesuffix("/step"): step for name, step in metrics.items() if name.endswith("/step")
        }

    def write(self, kind: str, values: Mapping[str, object]) -> None:
        from mlflow.entities import Metric

        step = step_of(values)
        if step <= self._last_steps.get(kind, -1):
            return
        now = int(1000 * time.time())
        metrics = [Metric(scalar.tag, scalar.value, now, step) for scalar in iter_scalars(kind, values)]
        for start in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics[start : start + _MAX_METRICS])

    def close(self, status: RunStatus) -> None:
        self._client.set_terminated(self._run_id, _STATUS[status])

    def _resume_run(self, experiment: str, folder: Path) -> str | None:
        """Continue the MLflow run of an earlier launch and return its id; None if there is none."""
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

        run_id = SinkState(folder).read(f"mlflow {experiment}")
        if run_id is None:
            return None
        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            # The MLflow run was deleted, or the id is from a different server.
            if error.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                return None
            raise
        return run_id

    def _create_run(self, experiment: str, folder: Path, hyperparameters: Mapping[str, object]) -> str:
        from mlflow.entities import Param

        existing = self._client.get_experiment_by_name(experiment)
        experiment_id = self._client.create_experiment(experiment) if existing is None else existing.experiment_id
        run_id: str = self._client.create_run(experiment_id, run_name=folder.resolve().name).info.run_id
        parameters = [Param(name, str(value)) for name, value in hyperparameters.items()]
        for start in range(0, len(parameters), _MAX_PARAMETERS):
            self._client.log_batch(run_id, params=parameters[start : start + _MAX_PARAMETERS])
        SinkState(folder).write(f"mlflow {experiment}", run_id)
        return run_id
