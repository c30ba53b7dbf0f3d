"""Log: what happened in a run, a line of JSON for each event, as if it had never been interrupted."""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from stretto.train.sinks.sink import LogLine
from stretto.train.sinks.sinks import Sinks

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Log:
    """A run's log, and the sinks that are fed the same lines."""

    file: TextIO
    sinks: Sinks | None = None


def open_log(path: Path, step: int) -> TextIO:
    """Open a run's log to go on after a step: what an earlier start has written of later ones is left out.

    A new file takes the old one's name, so that a start which was cut off and still writes does so nowhere.
    """
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    with partial.open("xb") as log:
        # Line by line: the log of a long run is larger than what else the first rank holds.
        for line in _lines(path):
            if _step_of(line) <= step:
                log.write(line.rstrip(b"\n") + b"\n")
        log.flush()
        os.fsync(log.fileno())
    partial.replace(path)
    return path.open("a", encoding="utf-8", buffering=1)


def write_line(log: Log | None, kind: str, values: Mapping[str, Any]) -> None:
    """Write one event, if there is a log on this rank."""
    if log is None:
        return
    # JSON has no word for what is not finite.
    plain = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
    try:
        log.file.write(json.dumps({"kind": kind, **plain}) + "\n")
    except OSError as error:
        # A line less is no reason to end a run; a full disk may have room again tomorrow.
        _log.warning("%s can't be written (%s); the run goes on", log.file.name, error.strerror)
    if log.sinks is not None:
        log.sinks.write(kind, plain)


def read_lines(path: Path, num_bytes: int) -> Iterator[LogLine]:
    """Give the lines of a log, as far as it went when it had so many bytes."""
    with path.open("rb") as log:
        for text in log:
            num_bytes -= len(text)
            if num_bytes < 0:
                return
            values = json.loads(text)
            yield values.pop("kind", "line"), values


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


def has_evaluation(path: Path, step: int) -> bool:
    """Does a log tell of an evaluation after this step?"""
    start = f'{{"kind": "evaluation", "step": {step},'.encode()
    return any(line.startswith(start) for line in _lines(path))
