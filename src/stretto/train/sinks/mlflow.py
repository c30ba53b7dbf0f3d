"""MLflow: a run of an experiment, in a store of the run's folder or on the server that the user has named."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from stretto.train.sinks.notes import Notes
from stretto.train.sinks.sink import Ending, figures, step_of

# As many as MLflow takes at once.
_MOST_METRICS, _MOST_PARAMETERS = 1000, 100
_STATUS: dict[Ending, str] = {"finished": "FINISHED", "failed": "FAILED", "left": "KILLED"}


class MlflowSink:
    """Metrics by `kind/name` over steps. All starts of a run are one run of MLflow, by an id kept in the folder.

    MLflow can't take back a metric, so a step that was there before is not written again.
    """

    needs_history = True

    def __init__(self, experiment: str, folder: Path, about: Mapping[str, object]) -> None:
        # Else MLflow reports on itself to its makers.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        server = os.environ.get("MLFLOW_TRACKING_URI")
        if server is None:
            # Its other store that needs no server needs a database.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        self._client = MlflowClient(server or (folder.resolve() / "mlflow").as_uri())
        self._run_id = self._go_on(experiment, folder) or self._begin(experiment, folder, about)
        metrics = self._client.get_run(self._run_id).data.metrics
        self._last = {name.removesuffix("/step"): step for name, step in metrics.items() if name.endswith("/step")}

    def write(self, kind: str, values: Mapping[str, object]) -> None:
        from mlflow.entities import Metric

        step = step_of(values)
        if step <= self._last.get(kind, -1):
            return
        now = int(1000 * time.time())
        metrics = [Metric(figure.tag, figure.value, now, step) for figure in figures(kind, values)]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics[first : first + _MOST_METRICS])

    def end_history(self) -> None:
        """It knows which steps it has."""

    def close(self, ending: Ending) -> None:
        self._client.set_terminated(self._run_id, _STATUS[ending])

    def _go_on(self, experiment: str, folder: Path) -> str | None:
        """Return the run that an earlier start has begun, if it is there."""
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

        run_id = Notes(folder).read(f"mlflow {experiment}")
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

    def _begin(self, experiment: str, folder: Path, about: Mapping[str, object]) -> str:
        from mlflow.entities import Param

        found = self._client.get_experiment_by_name(experiment)
        experiment_id = self._client.create_experiment(experiment) if found is None else found.experiment_id
        run_id: str = self._client.create_run(experiment_id, run_name=folder.resolve().name).info.run_id
        parameters = [Param(name, str(value)) for name, value in about.items()]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(run_id, params=parameters[first : first + _MOST_PARAMETERS])
        Notes(folder).write(f"mlflow {experiment}", run_id)
        return run_id
