"""A run's log file: one line of JSON per event, as if the run had never been interrupted."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from stretto.base.disk import atomic_path
from stretto.train.sinks.sink import LogLine


def open_log(path: Path, step: int) -> TextIO:
    """Open a log to continue after a step; drop the lines that an earlier start wrote of later steps.

    A new file replaces the old one, so that an earlier start which still writes does so to a file that nobody reads.
    """
    with atomic_path(path) as partial, partial.open("wb") as log:
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
