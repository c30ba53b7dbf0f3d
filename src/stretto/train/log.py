"""A run's log: one line of JSON per event, as if the run had never been interrupted. Trackers get the same lines."""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TextIO

from stretto.base.disk import atomic_path
from stretto.base.run_folder import RunFolder
from stretto.config.run import RunConfig
from stretto.train.events import Event, log_line
from stretto.train.sinks.sink import LogLine
from stretto.train.sinks.sinks import Sinks, flatten, open_sinks

_log = logging.getLogger(__name__)


class Recorder:
    """A run's log, and the sinks that get the same lines. Only the first rank has one."""

    def __init__(self, file: TextIO, sinks: Sinks | None = None) -> None:
        self._file = file
        self._sinks = sinks

    def record(self, event: Event) -> None:
        """Write the line of an event."""
        self.write(*log_line(event))

    def write(self, kind: str, values: Mapping[str, object]) -> None:
        """Write one line."""
        # JSON has no NaN and no infinity.
        finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        try:
            self._file.write(json.dumps({"kind": kind, **finite}) + "\n")
        except OSError as error:
            # A missing line is no reason to end a run; a full disk may have space again tomorrow.
            _log.warning("%s can't be written (%s); the run continues", self._file.name, error.strerror)
        if self._sinks is not None:
            self._sinks.write(kind, finite)


@contextmanager
def open_recorder(folder: RunFolder, config: RunConfig, step: int) -> Iterator[Recorder]:
    """Open the log and the sinks of a run, to continue after a step."""
    with folder.writing():
        file = open_log(folder.log, step)
    history = partial(read_lines, folder.log, folder.log.stat().st_size)
    hyperparameters = flatten(config.model_dump(mode="json", exclude_none=True))
    with (
        file,
        open_sinks(config.logging, folder.path, step=step, hyperparameters=hyperparameters, history=history) as sinks,
    ):
        yield Recorder(file, sinks)


def open_log(path: Path, step: int) -> TextIO:
    """Open a log to continue after a step; drop the lines that an earlier start wrote of later steps.

    A new file replaces the old one, so that an earlier start which still writes does so to a file that nobody reads.
    """
    with atomic_path(path) as new_path, new_path.open("wb") as log:
        # Line by line: the log of a long run is larger than anything else that the first rank holds.
        for line in _lines(path):
            if _step_of(line) <= step:
                log.write(line.rstrip(b"\n") + b"\n")
        log.flush()
        os.fsync(log.fileno())
    return path.open("a", encoding="utf-8", buffering=1)


def read_lines(path: Path, num_bytes: int) -> Iterator[LogLine]:
    """Yield the lines in the first `num_bytes` of a log."""
    with path.open("rb") as log:
        for text in log:
            num_bytes -= len(text)
            if num_bytes < 0:
                return
            values = json.loads(text)
            yield values.pop("kind", "line"), values


def has_evaluation(path: Path, step: int) -> bool:
    """Does a log have an evaluation after this step?"""
    start = f'{{"kind": "evaluation", "step": {step},'.encode()
    return any(line.startswith(start) for line in _lines(path))


def _lines(path: Path) -> Iterator[bytes]:
    if path.exists():
        with path.open("rb") as log:
            yield from log


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        # The last line of a run that was killed while it wrote.
        return math.inf
