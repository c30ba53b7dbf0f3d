"""A run's log: one JSON line per event, also sent to trackers. A resumed run drops the lines of steps it repeats.

Only the end of a log is read, however long it is: before the line of a step, all lines are of that step or earlier. A
long log is not copied either, see `log_segments`; a short one is. Some trackers read the whole log, in their threads.
"""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TextIO

from stretto.base.bounded_read import MAX_READ_BYTES
from stretto.base.disk import atomic_path, fsync_folder
from stretto.base.log_segments import (
    LogSegment,
    add_segment,
    header_line,
    list_segments,
    remove_repeated_lines,
    segment_lines,
    segment_number,
)
from stretto.base.redact import redact
from stretto.base.run_folder import RunFolder
from stretto.config.run import RunConfig
from stretto.train.node_report import NodeReport
from stretto.train.sinks.sink import LogLine
from stretto.train.sinks.sinks import Sinks, open_sinks

_log = logging.getLogger(__name__)
CORRUPTION = "corruption"  # the kind of a line that names a rank with wrong weights; a resumed run keeps it
_BLOCK_BYTES = 1 << 16
_MAX_COPIED_BYTES = 16 << 20  # of a log; a longer one becomes a segment


class LogWriter:
    """A run's log, and the sinks that get the same lines. Only the first rank has one."""

    def __init__(self, file: TextIO, sinks: Sinks | None = None) -> None:
        self._file = file
        self._sinks = sinks
        self._num_failures = 0  # in a row

    def write(self, kind: str, values: Mapping[str, object]) -> None:
        """Write a line of this kind to the log and the sinks."""
        # JSON has no NaN or infinity; they become null.
        fields = redact(dict(values)).items()
        finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in fields}
        try:
            self._file.write(json.dumps({"kind": kind, **finite}) + "\n")
            if self._num_failures:
                _log.warning("%s can be written again; it may lack up to %d lines", self._file.name, self._num_failures)
            self._num_failures = 0
        except OSError as error:
            # A missing line is no reason to end a run, and a full disk may have space again later. One warning is
            # enough: there is a line for each step.
            if not self._num_failures:
                _log.warning("%s can't be written (%s); the run continues", self._file.name, error.strerror)
            self._num_failures += 1
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
    history = partial(read_lines, list_segments(folder.log))
    hyperparameters = {
        f"{section}.{name}": value
        for section, values in config.public().items()
        for name, value in values.items()
        if value is not None
    }
    with (
        _closing(file),
        open_sinks(config.logging, folder.path, step=step, hyperparameters=hyperparameters, history=history) as sinks,
    ):
        yield LogWriter(file, sinks)


@contextmanager
def _closing(file: TextIO) -> Iterator[None]:
    try:
        yield
    finally:
        with suppress(OSError):  # the last lines can't be written: `LogWriter` has warned
            file.close()


def open_log(path: Path, step: int) -> TextIO:
    """Open a log to continue after `step`; drop the lines that an earlier launch wrote about later steps.

    A new file replaces the old one. If an earlier launch is still running, it writes to a file, or to the end of a
    segment, that nobody reads.
    """
    last_step: tuple[LogSegment, int] | None = None  # where the line of the last step to keep begins
    kept_lines = []
    segments = list_segments(path)
    for missing in (segment for segment in segments if segment.is_missing):
        _log.warning("the beginning of %s is in %s, which is missing; put it back", path, missing.path.name)
    for segment, start, line in _lines_backwards(segments):
        kind, line_step = _parse(line)
        if line_step <= step or kind == CORRUPTION:
            kept_lines.append(line.rstrip(b"\n") + b"\n")
            if kind == "step":
                last_step = segment, start
                break
    with atomic_path(path) as new_path, new_path.open("wb") as log:
        if last_step is not None:
            log.writelines(_continue_segment(path, *last_step, step))
        log.writelines(reversed(kept_lines))
    remove_repeated_lines(path, segments)
    return path.open("a", encoding="utf-8", buffering=1)


def _continue_segment(log: Path, segment: LogSegment, num_bytes: int, step: int) -> Iterator[bytes]:
    """Yield the beginning of a new log, which continues the first bytes of a segment: these, or a header."""
    number = segment_number(log, segment.path)
    if not number and num_bytes > _MAX_COPIED_BYTES:
        number = add_segment(log)
        fsync_folder(log.parent)
    if number:
        yield header_line(number, num_bytes, step)
        return
    with segment.path.open("rb") as source:
        while num_bytes and (block := source.read(min(_BLOCK_BYTES, num_bytes))):
            yield block
            num_bytes -= len(block)


def read_lines(segments: Sequence[LogSegment]) -> Iterator[LogLine]:
    """Yield the kind and the fields of each line of a log, as long as it was when its segments were listed."""
    for text in filter(None, segment_lines(segments)):
        with suppress(ValueError, RecursionError):  # a line that is damaged is left out
            values = json.loads(text)
            if isinstance(values, dict):
                yield values.pop("kind", "line"), values  # `LogWriter` writes no line without a kind


def has_line(path: Path, kind: str, step: int) -> bool:
    """Return whether a log has a line of this kind about `step`: that of the step, or one after it."""
    for _, _, line in _lines_backwards(list_segments(path)):
        line_kind, line_step = _parse(line)
        if line_kind == kind and line_step == step:
            return True
        if line_kind == "step" and line_step < step:
            return False
    return False


def _lines_backwards(segments: Sequence[LogSegment]) -> Iterator[tuple[LogSegment, int, bytes]]:
    """Yield the lines of a log from the last to the first, with the segment and the position of each."""
    for segment in reversed([segment for segment in segments if not segment.is_missing]):
        for start, line in _segment_backwards(segment):
            yield segment, start, line


def _segment_backwards(segment: LogSegment) -> Iterator[tuple[int, bytes]]:
    with segment.path.open("rb") as log:
        position, rest = segment.stop, b""
        while position > segment.start:
            num_bytes = min(max(_BLOCK_BYTES, len(rest)), position - segment.start)  # long lines take few reads
            position -= num_bytes
            log.seek(position)
            block = log.read(num_bytes) + rest
            # The first line of a block may have begun before it.
            is_first = position == segment.start
            first_end = block.find(b"\n", 0, len(block) - 1) + 1
            if not is_first and first_end == 0:
                rest = block if len(block) <= MAX_READ_BYTES else b""  # it is damaged, and so are its two parts
                continue
            start = 0 if is_first else first_end
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
