"""A run's log: one JSON line per event, also sent to trackers. A resumed run drops the lines of steps it repeats."""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TextIO

from stretto.base.bounded_read import bounded_lines
from stretto.base.disk import atomic_path
from stretto.base.run_folder import RunFolder
from stretto.config.run import RunConfig
from stretto.train.sinks.sink import LogLine
from stretto.train.sinks.sinks import Sinks, open_sinks

_log = logging.getLogger(__name__)


class LogWriter:
    """A run's log, and the sinks that get the same lines. Only the first rank has one."""

    def __init__(self, file: TextIO, sinks: Sinks | None = None) -> None:
        self._file = file
        self._sinks = sinks

    def write(self, kind: str, values: Mapping[str, object]) -> None:
        """Write a line of this kind to the log and the sinks."""
        # JSON has no NaN or infinity; they become null.
        finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        try:
            self._file.write(json.dumps({"kind": kind, **finite}) + "\n")
        except OSError as error:
            # A missing line is no reason to end a run, and a full disk may have space again later.
            _log.warning("%s can't be written (%s); the run continues", self._file.name, error.strerror)
        if self._sinks is not None:
            self._sinks.write(kind, finite)


@contextmanager
def open_log_writer(folder: RunFolder, config: RunConfig, step: int) -> Iterator[LogWriter]:
    """Open a run's log and sinks within this context, to continue after `step`."""
    with folder.explain_write_errors():
        file = open_log(folder.log, step)
    history = partial(read_lines, folder.log, folder.log.stat().st_size)
    sections = config.model_dump(mode="json", exclude_none=True)
    hyperparameters = {f"{section}.{name}": value for section in sections for name, value in sections[section].items()}
    with (
        file,
        open_sinks(config.logging, folder.path, step=step, hyperparameters=hyperparameters, history=history) as sinks,
    ):
        yield LogWriter(file, sinks)


def open_log(path: Path, step: int) -> TextIO:
    """Open a log to continue after `step`; drop the lines that an earlier launch wrote about later steps.

    A new file replaces the old one. If an earlier launch is still running, it writes to a file that nobody reads.
    """
    with atomic_path(path) as new_path, new_path.open("wb") as log:
        # Line by line, as the log of a long run may not fit into memory.
        for line in _lines(path):
            if _parse_step(line) <= step:
                log.write(line.rstrip(b"\n") + b"\n")
        log.flush()
        os.fsync(log.fileno())
    return path.open("a", encoding="utf-8", buffering=1)


def read_lines(path: Path, num_bytes: int) -> Iterator[LogLine]:
    """Yield the kind and the fields of each line in the first `num_bytes` bytes of a log, which may be growing."""
    with path.open("rb") as log:
        for text in log:
            num_bytes -= len(text)
            if num_bytes < 0:
                return
            values = json.loads(text)
            yield values.pop("kind", "line"), values  # `LogWriter` writes no line without a kind


def has_evaluation(path: Path, step: int) -> bool:
    """Return whether a log has the evaluation at `step`; its line begins with the keys `kind` and `step`."""
    prefix = f'{{"kind": "evaluation", "step": {step},'.encode()
    return any(line.startswith(prefix) for line in _lines(path))


def _lines(path: Path) -> Iterator[bytes]:
    if path.exists():
        with path.open("rb") as log:
            yield from filter(None, bounded_lines(log))


def _parse_step(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        # The line is incomplete: the run was killed while writing it. Infinity makes `open_log` drop it.
        return math.inf
