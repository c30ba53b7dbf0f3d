"""Weights & Biases: a run of a project, in files of the run's folder until someone sends them."""

import os
import uuid
from collections.abc import Mapping
from pathlib import Path

from stretto.train.sinks.sink import RunStatus, iter_scalars, step_of
from stretto.train.sinks.state import SinkState

# Seconds after which a line is in the file; what came later is lost if the process is killed.
_FLUSH_EVERY = 1.0


class WandbSink:
    """A row of figures for each step. All starts of a run are one run of W&B, by an id that is kept in the folder.

    Offline, W&B can't go on with a run: each start has files of its own, of which those that are sent last take the
    place of all others. So each start writes the whole history, and the newest files are all there is to send.
    """

    needs_history = True

    def __init__(self, project: str, folder: Path, hyperparameters: Mapping[str, object]) -> None:
        # Else W&B reports on itself to its makers, even if the run is offline.
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
            # Its watcher of the machine outlives a run that is killed.
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
            x_transaction_log_flush_interval=_FLUSH_EVERY,
            # A run that the user's own script may have open is none of our business.
            reinit="create_new",
        )
        self._run = wandb.init(
            project=project,
            id=run_id,
            name=folder.resolve().name,
            dir=folder,
            config=dict(hyperparameters),
            # There is nobody to ask offline.
            resume=None if mode in ("offline", "dryrun") else "allow",
            settings=settings,
        )
        # Where a server has the run already, up to here.
        self._first = self._run.step
        self._step = 0
        state.write(name, run_id)

    def write(self, kind: str, values: Mapping[str, object]) -> None:
        if step_of(values) < self._first:
            return
        # W&B takes no row for a step that is past, and a save is told of when the run has gone on.
        self._step = max(self._step, step_of(values))
        found = {scalar.tag: scalar.value for scalar in iter_scalars(kind, values) if scalar.name != "step"}
        self._run.log(found, step=self._step)

    def end_history(self) -> None:
        """Each start writes it anew."""

    def close(self, status: RunStatus) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)
