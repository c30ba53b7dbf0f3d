"""Opens a user's file for reading, whether or not it is compressed: the one place that looks at `.gz`, `.bz2`, `.zst`.

A compressed file is decompressed as it is read, so memory is bounded; it can only be read from its beginning, and never
has more content than `expansion_limit` allows.
"""

import bz2
import gzip
import io
import sys
import zlib
from importlib import import_module
from pathlib import Path
from typing import IO, Any, cast

from stretto.base.errors import DataError
from stretto.base.extras import install_command
from stretto.base.reason import short_reason
from stretto.prepare.expansion_limit import expansion_error, expansion_limit

COMPRESSED_SUFFIXES = (".gz", ".bz2", ".zst")
_READ_BYTES = 1 << 18


def is_compressed(path: Path) -> bool:
    """Return whether a file is compressed, by its name."""
    return path.suffix.lower() in COMPRESSED_SUFFIXES


def content_name(path: Path) -> Path:
    """Return the name of a file's content: `a.csv` for `a.csv.gz`."""
    return path.with_suffix("") if is_compressed(path) else path


def content_suffix(path: Path) -> str:
    """Return the suffix that says what a file contains, in lower case: `.csv` for `a.csv.gz`."""
    return content_name(path).suffix.lower()


def open_binary(path: Path, offset: int = 0) -> io.BufferedReader:
    """Open the content of a file at an offset; in a compressed file, all content before it is read to get there."""
    if not is_compressed(path):
        file: io.BufferedReader = path.open("rb")
        file.seek(offset)
        return file
    expanded: io.BufferedReader = io.BufferedReader(ExpandedFile(path), _READ_BYTES)
    while offset > 0 and (block := expanded.read(min(offset, _READ_BYTES))):
        offset -= len(block)
    return expanded


def open_text(path: Path, start: int = 0, stop: int = sys.maxsize) -> io.TextIOWrapper:
    """Open the content of a UTF-8 file with or without a byte order mark; line ends are kept as they are.

    `start` and `stop` are the first byte, and the byte after the last one. Only a file's first bytes are a mark.
    Bytes that are not UTF-8 become surrogates, so that a bad cell spoils only its row, not the whole file.
    """
    file = open_binary(path, start)
    if stop < sys.maxsize:
        file = io.BufferedReader(_BeginningOfFile(file, stop - start), _READ_BYTES)
    return io.TextIOWrapper(file, encoding="utf-8" if start else "utf-8-sig", errors="surrogateescape", newline="")


def content_size(path: Path) -> int:
    """Return the size of a file's content; a compressed file is read once for that."""
    if not is_compressed(path):
        return path.stat().st_size
    with open_binary(path) as file:
        return sum(len(block) for block in iter(lambda: file.read(_READ_BYTES), b""))


class _BeginningOfFile(io.RawIOBase):
    """The first bytes of an open file."""

    def __init__(self, file: io.BufferedReader, num_bytes: int) -> None:
        self._file, self._num_left = file, num_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401 - any writable buffer
        view = memoryview(buffer).cast("B")
        content = self._file.read(min(len(view), self._num_left))
        self._num_left -= len(content)
        view[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._file.close()
        super().close()


class ExpandedFile(io.RawIOBase):
    """The content of a compressed file; raises DataError if it is damaged, or larger than the limit."""

    def __init__(self, path: Path) -> None:
        self._path, self._num_read, self._limit = path, 0, expansion_limit(path)
        self._source = path.open("rb")
        self._stream: IO[bytes] = self._source  # both are closed, even if the next line raises
        self._stream = _open_stream(path, self._source)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401 - any writable buffer
        view = memoryview(buffer).cast("B")
        try:
            # Never more than was asked for, however well the file is compressed.
            content = self._stream.read(len(view))
        except (OSError, EOFError, ValueError, zlib.error) as error:
            reason = short_reason(error)
            raise DataError(f"{self._path} can't be decompressed ({reason}); copy or write it again") from None
        self._num_read += len(content)
        if self._num_read > self._limit:
            raise expansion_error(self._path, "unpack it first")
        view[: len(content)] = content
        return len(content)

    @property
    def fraction_read(self) -> float:
        """The fraction of the compressed file that was read."""
        return self._source.tell() / max(1, self._path.stat().st_size)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
            self._source.close()
        super().close()


def _open_stream(path: Path, source: IO[bytes]) -> IO[bytes]:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast("IO[bytes]", gzip.GzipFile(fileobj=source))
    if suffix == ".bz2":
        return cast("IO[bytes]", _Bz2Stream(source))
    try:
        pyarrow = import_module("pyarrow")
    except ImportError:
        raise DataError(f"reading {path} needs pyarrow; {install_command('parquet')}") from None
    return cast("IO[bytes]", pyarrow.CompressedInputStream(source, "zstd"))


class _Bz2Stream:
    """The content of all streams of a bzip2 file; `bz2.BZ2File` would ignore a damaged one after the first."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source, self._decompressor = source, bz2.BZ2Decompressor()

    def read(self, size: int) -> bytes:
        content = b""
        while not content:
            block = self._decompressor.unused_data
            if not block and (self._decompressor.eof or self._decompressor.needs_input):
                block = self._source.read(_READ_BYTES)
                if not block and self._decompressor.eof:
                    return b""
                if not block:
                    raise EOFError("it ends before the end of its stream")
            if self._decompressor.eof:
                self._decompressor = bz2.BZ2Decompressor()
            content = self._decompressor.decompress(block, size)
        return content

    def close(self) -> None:
        """Do nothing: `ExpandedFile` closes the source."""
