"""Weights & Biases: logs to a W&B run; without a login offline, in files that the user can upload."""

import netrc
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from stretto.train.sinks.sink import RunStatus, Sink, iter_scalars, step_of
from stretto.train.sinks.state import SinkState

# How often W&B flushes its file. If the process is killed, the lines since the last flush are lost. Before version 0.31
# there is no such setting, and W&B flushes each time that 32 KiB are full.
_FLUSH_INTERVAL = {"x_transaction_log_flush_interval": 1.0}


class WandbSink(Sink):
    """Logs a row of values for each line of the run's log. All launches log to one W&B run, whose id is in the folder.

    Offline, W&B can't resume a run: each launch has its own files, and those uploaded last replace all others. So
    each launch writes the whole history, and only the newest files need to be uploaded.
    """

    needs_history = True

    def __init__(self, project: str, folder: Path, hyperparameters: Mapping[str, object]) -> None:
        # Otherwise W&B sends error reports, even if the run is offline.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        mode = find_mode()
        state, state_key = SinkState(folder), f"wandb {project}"
        # The agent of a sweep has made a run, and its id, before it starts this process.
        run_id = state.read(state_key) or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:16]
        settings = wandb.Settings(
            **({} if mode is None else {"mode": mode}),
            silent=True,
            console="off",
            save_code=False,
            disable_git=True,
            # W&B's system monitor outlives a run that is killed.
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
            **(_FLUSH_INTERVAL if _FLUSH_INTERVAL.keys() <= wandb.Settings.model_fields.keys() else {}),
            # The user's script may have a W&B run open, which must not be ended.
            reinit="create_new",
        )
        self._run = wandb.init(
            project=project,
            id=run_id,
            name=folder.resolve().name,
            dir=folder,
            config=dict(hyperparameters),
            # Offline (formerly "dryrun") there is no server that could have the run.
            resume=None if mode in ("offline", "dryrun") else "allow",
            settings=settings,
        )
        # If the server already has some steps, this is the first that it lacks.
        self._first_step = self._run.step
        self._last_step = 0
        state.write(state_key, run_id)

    def write(self, kind: str, values: Mapping[str, object]) -> None:
        if step_of(values) < self._first_step:
            return
        # W&B rejects rows for earlier steps. A save's line, which comes some steps late, is logged at the newest step.
        self._last_step = max(self._last_step, step_of(values))
        row = {scalar.tag: scalar.value for scalar in iter_scalars(kind, values) if scalar.name != "step"}
        self._run.log(row, step=self._last_step)

    def close(self, status: RunStatus) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


def find_mode() -> str | None:
    """Return the mode to log in: WANDB_MODE, or offline without a login; None if W&B's own settings decide."""
    mode = os.environ.get("WANDB_MODE")
    if mode:
        return mode
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return None
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        is_logged_in = netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        is_logged_in = False
    return None if is_logged_in else "offline"
