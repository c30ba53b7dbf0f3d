"""A run's log: one JSON line per event, also sent to trackers. A resumed run drops the lines of steps it repeats.

Only the end of a log is read, however long it is: before the line of a step, all lines are of that step or earlier.
"""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, TextIO

from stretto.base.bounded_read import MAX_READ_BYTES
from stretto.base.disk import atomic_path
from stretto.base.run_folder import RunFolder
from stretto.config.run import RunConfig
from stretto.train.node_report import NodeReport
from stretto.train.sinks.sink import LogLine
from stretto.train.sinks.sinks import Sinks, open_sinks

_log = logging.getLogger(__name__)
_BLOCK_BYTES = 1 << 16


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

    def write_node(self, report: NodeReport) -> None:
        """Pass a report on this node to the sinks; the log has the figures of all ranks in its own lines."""
        if self._sinks is not None:
            self._sinks.write_node(report)


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
    num_kept, kept_lines = 0, []
    for start, line in _lines_backwards(path):
        kind, line_step = _parse(line)
        if line_step <= step:
            kept_lines.append(line.rstrip(b"\n") + b"\n")
            if kind == "step":
                num_kept = start
                break
    with atomic_path(path) as new_path, new_path.open("wb") as log:
        _copy_start(path, log, num_kept)
        log.writelines(reversed(kept_lines))
        log.flush()
        os.fsync(log.fileno())
    return path.open("a", encoding="utf-8", buffering=1)


def _copy_start(path: Path, target: BinaryIO, num_bytes: int) -> None:
    """Copy the first bytes of a file, without reading their lines."""
    if num_bytes:
        with path.open("rb") as source:
            while num_bytes and (block := source.read(min(_BLOCK_BYTES, num_bytes))):
                target.write(block)
                num_bytes -= len(block)


def read_lines(path: Path, num_bytes: int) -> Iterator[LogLine]:
    """Yield the kind and the fields of each line in the first `num_bytes` bytes of a log, which may be growing."""
    with path.open("rb") as log:
        for text in log:
            num_bytes -= len(text)
            if num_bytes < 0:
                return
            with suppress(ValueError, RecursionError):  # a line that is damaged is left out
                values = json.loads(text)
                if isinstance(values, dict):
                    yield values.pop("kind", "line"), values  # `LogWriter` writes no line without a kind


def has_evaluation(path: Path, step: int) -> bool:
    """Return whether a log has the evaluation at `step`; its line comes after that of the step."""
    for _, line in _lines_backwards(path):
        kind, line_step = _parse(line)
        if kind == "evaluation" and line_step == step:
            return True
        if kind == "step" and line_step < step:
            return False
    return False


def _lines_backwards(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a log from the last to the first, with the position of each."""
    if not path.exists():
        return
    with path.open("rb") as log:
        position, rest = log.seek(0, os.SEEK_END), b""
        while position > 0:
            num_bytes = min(max(_BLOCK_BYTES, len(rest)), position)  # long lines take few reads
            position -= num_bytes
            log.seek(position)
            block = log.read(num_bytes) + rest
            # The first line of a block may have begun before it.
            first_end = block.find(b"\n", 0, len(block) - 1) + 1
            if position > 0 and first_end == 0:
                rest = block if len(block) <= MAX_READ_BYTES else b""  # it is damaged, and so are its two parts
                continue
            start = first_end if position > 0 else 0
            rest = block[:start]
            lines = block[start:].splitlines(keepends=True)
            end = position + len(block)
            for line in reversed(lines):
                end -= len(line)
                yield end, line


def _parse(line: bytes) -> tuple[str, float]:
    """Return the kind and the step of a line; an infinite step if it is incomplete, as after a kill while writing."""
    try:
        values = json.loads(line)
        return str(values["kind"]), float(values["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", math.inf
