"""Segments of a run's log: the files that hold it, in order.

log-00001.jsonl   the beginning of a long log
log-00002.jsonl   its first line names the segment before it, and how many bytes of that belong to the log
log.jsonl         the end, to which the run writes; most logs have only this file

A launch that resumes never writes to the file of an earlier launch, which may still be running on another machine. A
long log is not copied for that: it becomes a segment, and the new file refers to it.
"""

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from stretto.base.bounded_read import bounded_lines, parse_json
from stretto.base.disk import NO_HARD_LINK_ERRORS

_KIND = "continues"
_MAX_HEADER_BYTES = 1000
_NAME = re.compile(r"-(\d{5})")
_MAX_NUMBER = 99_999


class LogSegment(NamedTuple):
    """The lines of one file from byte `start`, after its header, to `stop`; what follows them is not of this log."""

    path: Path
    start: int
    stop: int
    is_missing: bool = False  # whether the log refers to this file, but it does not exist or is a symbolic link


def list_segments(log: Path) -> list[LogSegment]:
    """Return the segments of a log, from the first, which may be missing; an empty list if the log does not exist."""
    segments: list[LogSegment] = []
    path, stop, limit = log, sys.maxsize, _MAX_NUMBER + 1
    while path.is_file():
        start, number, num_bytes = _read_header(path)
        segments.append(LogSegment(path, start, min(stop, path.stat().st_size)))
        if start == 0:
            break
        path = segment_path(log, number)
        # Numbers decrease, so this ends, whatever the files say.
        if not 0 < number < limit or path.is_symlink() or not path.is_file():
            segments.append(LogSegment(path, 0, 0, is_missing=True))
            break
        stop, limit = num_bytes, number
    return segments[::-1]


def segment_lines(segments: Sequence[LogSegment]) -> Iterator[bytes | None]:
    """Yield the lines of segments; None in place of a line that is too long, or of a segment that is missing."""
    for segment in segments:
        if segment.is_missing:
            yield None
            continue
        with segment.path.open("rb") as file:
            position = file.seek(segment.start)
            for line in bounded_lines(file):
                position = file.tell() if line is None else position + len(line)
                if position > segment.stop:
                    break
                yield line


def segment_path(log: Path, number: int) -> Path:
    """Return the path of a segment other than the last, which is the log itself."""
    return log.with_name(f"{log.stem}-{number:05}{log.suffix}")


def segment_number(log: Path, path: Path) -> int:
    """Return the number of a segment; 0 if the file is the log itself, or no segment of it."""
    match = _NAME.fullmatch(path.stem.removeprefix(log.stem))
    return int(match[1]) if match and path.suffix == log.suffix and path.stem.startswith(log.stem) else 0


def add_segment(log: Path) -> int:
    """Make a segment of a log, which keeps its name too; return its number, 0 if the filesystem has no hard links."""
    paths = [path for path in log.parent.iterdir() if segment_number(log, path)]
    for path in paths:
        if path.is_file() and path.samefile(log):
            return segment_number(log, path)  # an earlier launch made it, and was killed before it replaced the log
    paths += [segment.path for segment in list_segments(log)]  # also one that is missing, and may be put back
    for number in range(1 + max(segment_number(log, path) for path in paths), _MAX_NUMBER + 1):
        try:
            os.link(log, segment_path(log, number))
        except FileExistsError:
            continue  # another launch has just made it
        except OSError as error:
            if error.errno not in NO_HARD_LINK_ERRORS:
                raise
            return 0
        return number
    return 0


def remove_repeated_lines(log: Path, replaced: Sequence[LogSegment]) -> None:
    """Remove what a log does not refer to of the segments of the log that it replaced.

    Other files are left alone: `log-20261117.jsonl` may be somebody's backup.
    """
    segments = list_segments(log)
    for segment in segments[:-1]:
        if not segment.is_missing and segment.path.stat().st_size > segment.stop:
            os.truncate(segment.path, segment.stop)
    used = {log, *(segment.path for segment in segments)}
    for segment in replaced:
        if segment.path not in used and not segment.is_missing:
            segment.path.unlink(missing_ok=True)


def header_line(number: int, num_bytes: int, step: int) -> bytes:
    """Return the first line of a file that continues the first bytes of a segment, after `step`."""
    header = {"kind": _KIND, "step": step, "segment": number, "num_bytes": num_bytes}
    return json.dumps(header).encode() + b"\n"


def _read_header(path: Path) -> tuple[int, int, int]:
    """Return the number of bytes of a file's header, the segment that it names, and the bytes of that; else zeros."""
    with path.open("rb") as file:
        line = file.readline(_MAX_HEADER_BYTES)
    try:
        header = parse_json(line)
    except ValueError:
        return 0, 0, 0
    if not isinstance(header, dict) or header.get("kind") != _KIND or not line.endswith(b"\n"):
        return 0, 0, 0
    number, num_bytes = header.get("segment"), header.get("num_bytes")
    if not isinstance(number, int) or not isinstance(num_bytes, int) or num_bytes < 0:
        return len(line), 0, 0
    return len(line), number, num_bytes
