"""Pages: a store's files in units of 1 MiB; a page's checksum is verified before its first use."""

import os
import weakref
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import DataError
from stretto.store.lru_cache import LruCache

PAGE_BYTES = 1 << 20
# A store may have thousands of files; at most this many are open at a time.
MAX_OPEN_FILES = 64

ByteArray = NDArray[np.uint8]


class ByteRange(NamedTuple):
    """Bytes `start` to `stop` of one file of a store."""

    file: str
    start: int
    stop: int


@dataclass(frozen=True)
class PagedFile:
    """A file of a store: its size, and the CRC-32 of each of its pages."""

    name: str
    num_bytes: int
    checksums: NDArray[np.uint32] = field(repr=False)

    def pages(self, start: int, stop: int) -> range:
        """Return the indices of the pages that hold bytes `start` to `stop`."""
        return range(start // PAGE_BYTES, -(-stop // PAGE_BYTES))

    def extent(self, page: int) -> tuple[int, int]:
        """Return where a page starts and stops, in bytes; the last page of a file may be shorter than the others."""
        return page * PAGE_BYTES, min((page + 1) * PAGE_BYTES, self.num_bytes)

    def is_intact(self, page: int, content: ByteArray | bytes) -> bool:
        """Return whether the content matches the page's size and checksum."""
        start, stop = self.extent(page)
        buffer = content if isinstance(content, bytes) else content.data
        return len(content) == stop - start and zlib.crc32(buffer) == int(self.checksums[page])


class Pages(Protocol):
    """Where a store's bytes come from: a folder, or object storage behind a cache."""

    def read(self, byte_ranges: Sequence[ByteRange]) -> list[ByteArray]:
        """Return the bytes of each range; raise DataError if they don't match their checksums."""


class LocalPages:
    """Pages of the files in a folder; each page is verified once per process, when it is first read.

    Files are read, not memory-mapped: if a mapped file is truncated, reading it kills the process (SIGBUS).
    """

    def __init__(self, folder: Path, files: Iterable[PagedFile]) -> None:
        self._folder = folder
        self._files = {file.name: file for file in files}
        self._open_files = LruCache[_Descriptor](MAX_OPEN_FILES)
        self._is_verified = {name: np.zeros(len(file.checksums), bool) for name, file in self._files.items()}

    def check_files(self) -> None:
        """Raise DataError if a file is missing or has a different size; otherwise, that is found when it is opened."""
        for file in self._files.values():
            _check_size(self._folder, file)

    def read(self, byte_ranges: Sequence[ByteRange]) -> list[ByteArray]:
        """Return the bytes of each range; verify pages that have not been read before."""
        for name, start, stop in byte_ranges:
            if not self._is_verified[name][start // PAGE_BYTES : -(-stop // PAGE_BYTES)].all():
                self._verify(self._files[name], start, stop)
        return [self._read_range(*byte_range) for byte_range in byte_ranges]

    def _read_range(self, name: str, start: int, stop: int) -> ByteArray:
        path = self._folder / name
        try:
            content = self._open_files.get(name, lambda: self._open(name)).read(start, stop)
        except OSError as error:
            raise DataError(f"{path} can't be read ({error.strerror}); check the disk, or copy it again") from error
        if len(content) < stop - start:
            raise DataError(f"{path} was truncated after it was opened; copy it again or prepare the data again")
        return np.frombuffer(content, np.uint8)

    def _open(self, name: str) -> "_Descriptor":
        return _Descriptor(_check_size(self._folder, self._files[name]))

    def _verify(self, file: PagedFile, start: int, stop: int) -> None:
        for page in file.pages(start, stop):
            page_start, page_stop = file.extent(page)
            if not file.is_intact(page, self._read_range(file.name, page_start, page_stop)):
                raise DataError(
                    f"{self._folder / file.name} is damaged between bytes {page_start:,} and {page_stop:,} "
                    "(checksum mismatch); copy it again or prepare the data again"
                )
            self._is_verified[file.name][page] = True


class _Descriptor:
    """An open file, closed when this object is garbage-collected."""

    def __init__(self, path: Path) -> None:
        self._number = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._number)

    def read(self, start: int, stop: int) -> bytes:
        # pread does not move the file position, which forked workers share. It returns at most 2 GiB per call.
        parts = []
        while start < stop and (part := os.pread(self._number, stop - start, start)):
            parts.append(part)
            start += len(part)
        return b"".join(parts)


def _check_size(folder: Path, file: PagedFile) -> Path:
    """Return the path of a store's file; raise DataError if it is missing or has a different size."""
    path = path_in_store(folder, file.name)
    size = path.stat().st_size if path.is_file() else None
    if size != file.num_bytes:
        problem = "is missing" if size is None else f"has {size:,} bytes, not {file.num_bytes:,}"
        raise DataError(f"{path} {problem}; copy it again or prepare the data again")
    return path


def path_in_store(folder: Path, name: str) -> Path:
    """Return the path of a store's file; raise DataError if it is a link to a file outside the folder."""
    path = folder / name
    # A store may come from anyone: a link in it could make us read any of the user's files.
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise DataError(f"{path} is a link to a file outside the store; copy the file itself into the folder")
    return path
