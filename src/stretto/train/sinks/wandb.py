"""Weights & Biases: a run of a project, in files of the run's folder until the user uploads them."""

import os
import uuid
from collections.abc import Mapping
from pathlib import Path

from stretto.train.sinks.sink import RunStatus, Sink, iter_scalars, step_of
from stretto.train.sinks.state import SinkState

# Lines of the last seconds are lost if the process is killed.
_FLUSH_EVERY = 1.0


class WandbSink(Sink):
    """A row of values for each step. All starts of a run are one W&B run, by an id in the run's folder.

    Offline, W&B can't resume a run: each start has its own files, and those that are uploaded last replace all others.
    So each start writes the whole history, and only the newest files need to be uploaded.
    """

    needs_history = True

    def __init__(self, project: str, folder: Path, hyperparameters: Mapping[str, object]) -> None:
        # Otherwise W&B sends error reports, even if the run is offline.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        mode = os.environ.get("WANDB_MODE", "offline")
        state = SinkState(folder)
        name = f"wandb {project}"
        run_id = state.read(name) or uuid.uuid4().hex[:16]
        settings = wandb.Settings(
            mode=mode,
            silent=True,
            console="off",
            save_code=False,
            disable_git=True,
            # W&B's system monitor outlives a run that is killed.
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
            x_transaction_log_flush_interval=_FLUSH_EVERY,
            # Leave a run alone that the user's script may have open.
            reinit="create_new",
        )
        self._run = wandb.init(
            project=project,
            id=run_id,
            name=folder.resolve().name,
            dir=folder,
            config=dict(hyperparameters),
            # There is no server to ask offline.
            resume=None if mode in ("offline", "dryrun") else "allow",
            settings=settings,
        )
        # A server may have the run up to this step.
        self._first = self._run.step
        self._step = 0
        state.write(name, run_id)

    def write(self, kind: str, values: Mapping[str, object]) -> None:
        if step_of(values) < self._first:
            return
        # W&B takes no row for an earlier step, and a save is reported some steps later.
        self._step = max(self._step, step_of(values))
        row = {scalar.tag: scalar.value for scalar in iter_scalars(kind, values) if scalar.name != "step"}
        self._run.log(row, step=self._step)

    def close(self, status: RunStatus) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)
