"""MLflow: a run of an experiment, in a store of the run's folder or on the server that the user has named."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from stretto.train.sinks.sink import RunStatus, iter_scalars, step_of
from stretto.train.sinks.state import SinkState

# As many as MLflow takes at once.
_MAX_METRICS, _MAX_PARAMETERS = 1000, 100
_STATUS: dict[RunStatus, str] = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class MlflowSink:
    """Metrics by `kind/name` over steps. All starts of a run are one run of MLflow, by an id kept in the folder.

    MLflow can't take back a metric, so a step that was there before is not written again.
    """

    needs_history = True

    def __init__(self, experiment: str, folder: Path, hyperparameters: Mapping[str, object]) -> None:
        # Else MLflow reports on itself to its makers.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        server = os.environ.get("MLFLOW_TRACKING_URI")
        if server is None:
            # Its other store that needs no server needs a database.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        self._client = MlflowClient(server or (folder.resolve() / "mlflow").as_uri())
        self._run_id = self._resume_run(experiment, folder) or self._create_run(experiment, folder, hyperparameters)
        metrics = self._client.get_run(self._run_id).data.metrics
        self._last = {name.removesuffix("/step"): step for name, step in metrics.items() if name.endswith("/step")}

    def write(self, kind: str, values: Mapping[str, object]) -> None:
        from mlflow.entities import Metric

        step = step_of(values)
        if step <= self._last.get(kind, -1):
            return
        now = int(1000 * time.time())
        metrics = [Metric(scalar.tag, scalar.value, now, step) for scalar in iter_scalars(kind, values)]
        for first in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics[first : first + _MAX_METRICS])

    def end_history(self) -> None:
        """It knows which steps it has."""

    def close(self, status: RunStatus) -> None:
        self._client.set_terminated(self._run_id, _STATUS[status])

    def _resume_run(self, experiment: str, folder: Path) -> str | None:
        """Return the run that an earlier start has begun, if it is there."""
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

        run_id = SinkState(folder).read(f"mlflow {experiment}")
        if run_id is None:
            return None
        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            # Of another server than the one that is named now.
            if error.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                return None
            raise
        return run_id

    def _create_run(self, experiment: str, folder: Path, hyperparameters: Mapping[str, object]) -> str:
        from mlflow.entities import Param

        found = self._client.get_experiment_by_name(experiment)
        experiment_id = self._client.create_experiment(experiment) if found is None else found.experiment_id
        run_id: str = self._client.create_run(experiment_id, run_name=folder.resolve().name).info.run_id
        parameters = [Param(name, str(value)) for name, value in hyperparameters.items()]
        for first in range(0, len(parameters), _MAX_PARAMETERS):
            self._client.log_batch(run_id, params=parameters[first : first + _MAX_PARAMETERS])
        SinkState(folder).write(f"mlflow {experiment}", run_id)
        return run_id
