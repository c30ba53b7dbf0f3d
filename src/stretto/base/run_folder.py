"""RunFolder: the files in a run's folder.

runs/book/
    config.toml            the config, with all defaults written out; the only file that has the secrets of URLs
    data_spec.json         what the data's numbers mean: task, labels, channels; for text, also vocabulary.json
    plan.json              the plan with its predicted step time, if layout.auto chose the layout
    log.jsonl              one line of JSON per event; log-00001.jsonl and so on have the beginning of a long log
    trace.json             one training step, recorded on every rank
    secret                 with which ranks that another launcher has started sign their messages
    checkpoints/           unless save.to names another place
    weights.safetensors    the final weights
    nonfinite/             batches whose loss or gradient was not finite
    sinks.json             what trackers (sinks) need to resume; their own files are in tensorboard/, mlflow/ and wandb/
    predictions.jsonl      what `stretto predict` writes, unless --out names another file
    report.html            what `stretto report` writes
"""

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from stretto.base.bounded_read import MAX_READ_BYTES, read_bounded
from stretto.base.disk import explain_write_errors, write_atomic
from stretto.base.errors import ConfigError

CONFIG = "config.toml"
DATA_SPEC = "data_spec.json"
PLAN = "plan.json"
LOG = "log.jsonl"
TRACE = "trace.json"
CHECKPOINTS = "checkpoints"
WEIGHTS = "weights.safetensors"
NONFINITE = "nonfinite"
SINK_STATE = "sinks.json"
PREDICTIONS = "predictions.jsonl"
REPORT = "report.html"
BEST = "@best"  # after the location of a run: its checkpoint with the best validation loss or metric


@dataclass(frozen=True)
class RunFolder:
    """A run's folder; it may not exist yet."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def config(self) -> Path:
        return self.file(CONFIG)

    @property
    def plan(self) -> Path:
        return self.file(PLAN)

    @property
    def log(self) -> Path:
        return self.file(LOG)

    @property
    def trace(self) -> Path:
        return self.file(TRACE)

    @property
    def weights(self) -> Path:
        return self.file(WEIGHTS)

    @property
    def checkpoints(self) -> Path:
        # Not through `file`, which rejects links that point outside: users may link this folder to a larger disk.
        return self.path / CHECKPOINTS

    @property
    def is_finished(self) -> bool:
        """Whether the folder has the final weights of a run."""
        return self.weights.is_file()

    def nonfinite_batch(self, step: int, rank: int) -> Path:
        """Return the path for a rank's part of a training batch whose loss or gradient was not finite."""
        return self.file(f"{NONFINITE}/step-{step}-rank-{rank}.safetensors")

    def nonfinite_batches(self) -> list[str]:
        """Return the file names of all saved non-finite batches."""
        return sorted(path.name for path in self.file(NONFINITE).glob("step-*"))

    def file(self, name: str) -> Path:
        """Return the path of a file; raise if the name, or a symbolic link of that name, points outside the folder."""
        path = self.path / name
        if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self.path)):
            raise ConfigError(f"{path} points outside the run's folder; if you trust the link, replace it with a copy")
        if path.is_fifo():
            raise ConfigError(f"{path} is a named pipe, not a file; don't trust the run's folder")
        return path

    def read(self, name: str, max_bytes: int = MAX_READ_BYTES) -> bytes | None:
        """Return a small file's content; None if there is no such file, DataError if it has more than `max_bytes`."""
        try:
            return read_bounded(self.file(name), max_bytes)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, content: bytes, *, is_private: bool = False) -> None:
        """Create or replace a file, completely or not at all; if it is private, only its owner can read it."""
        with self.explain_write_errors():
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomic(self.file(name), content, is_private=is_private)

    def explain_write_errors(self) -> AbstractContextManager[None]:
        """Return a context manager that turns a file-system error into a ConfigError that names the folder."""
        return explain_write_errors(f"run.folder={self}", "choose a different folder")


def split_best(location: Path | str) -> tuple[str, bool]:
    """Return the location of a run without `@best`, and whether it ended with that."""
    text = str(location)
    return text.removesuffix(BEST), text.endswith(BEST)
