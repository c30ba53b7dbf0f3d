"""Reads files that may come from anyone: a file, line or archive that is too large is refused, not read whole."""

import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from stretto.base.errors import DataError

# The limit for a file that is read whole, such as a manifest or an index, and for a line or cell of a user's file. A
# manifest for 4,096 ranks with a hundred tensors each is about 50 MB.
MAX_READ_BYTES = 128 << 20
MAX_CONFIG_BYTES = 128 << 10  # of a TOML file, which is parsed slowly
_MAX_KEY_PARTS = 64
# The content of an archive may have 1 GiB or four times the size of the file, whichever is larger. Keras and torch
# don't compress theirs.
_MIN_EXPANDED_BYTES, _MAX_EXPANSION = 1 << 30, 4
_BLOCK_BYTES = 1 << 20  # per read
# A string without its closing quotes matches too: what follows is not parsed. Possessive repeats keep this linear.
_STRING_OR_COMMENT = re.compile(
    r'''"""(?:[^"\\]++|\\.|"(?!""))*+(?:"{3,5})?+|"(?:[^"\\\n]++|\\[^\n])*+"?+|'''
    r"""'''(?:[^']++|'(?!''))*+(?:'{3,5})?+|'[^'\n]*+'?+|#[^\n]*+""",
    re.DOTALL,
)


def read_bounded(path: Path, max_bytes: int = MAX_READ_BYTES) -> bytes:
    """Return the content of a file; raise DataError if it is larger than `max_bytes` or not a regular file."""
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path} is not a regular file; don't trust it")
        if status.st_size > max_bytes:
            raise too_large(str(path), max_bytes)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return read_stream(file, str(path), max_bytes)
    finally:
        os.close(descriptor)


def read_stream(file: IO[bytes], name: str, max_bytes: int = MAX_READ_BYTES) -> bytes:
    """Return the rest of an open file; raise DataError if that is more than `max_bytes`."""
    parts, num_bytes = [], 0
    while part := file.read(_BLOCK_BYTES):
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise too_large(name, max_bytes)
    return b"".join(parts)


def bounded_lines(file: IO[bytes], max_bytes: int = MAX_READ_BYTES) -> Iterator[bytes | None]:
    """Yield the lines of a file; None in place of a line that is longer than `max_bytes`."""
    while line := file.readline(max_bytes + 1):
        if len(line) <= max_bytes:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(_BLOCK_BYTES)
        yield None


def check_expanded_size(path: Path, num_bytes: int) -> None:
    """Raise DataError if the content of an archive, `num_bytes` when unpacked, is too large for the file's own size."""
    limit = max(_MIN_EXPANDED_BYTES, _MAX_EXPANSION * path.stat().st_size)
    if num_bytes > limit:
        raise DataError(
            f"the content of {path} would take {num_bytes:,} bytes, more than the limit of {limit:,} for a file of its "
            "size; don't trust it"
        )


def too_large(name: str, max_bytes: int) -> DataError:
    """Return the error for a file that is larger than `max_bytes`."""
    size = f"{max_bytes >> 20} MiB" if max_bytes >= 1 << 20 else f"{max_bytes >> 10} KiB"
    return DataError(f"{name} is larger than {size}, the limit for files of its kind; don't trust it")


def parse_json(content: bytes | str) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value in JSON text; ValueError if it is malformed, also if it is nested too deeply for Python."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables in TOML text; ValueError if it is malformed or nested too deeply."""
    # tomllib takes time and memory in the square of a key's parts: 39 GB for one of 200 kB.
    if any(part.count(".") >= _MAX_KEY_PARTS for part in re.split("[=,\n]", _STRING_OR_COMMENT.sub("", text))):
        raise ValueError(f"a key has more than {_MAX_KEY_PARTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
