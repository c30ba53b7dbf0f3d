"""Pages: the bytes of a store's files, a mebibyte at a time, each page checked before it is first used."""

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

PAGE = 1 << 20
# Files that are open at a time, of the thousands that there may be.
MAX_OPEN_FILES = 64

Bytes = NDArray[np.uint8]


class ByteRange(NamedTuple):
    """Some bytes of one file of a store."""

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
        """Return the numbers of the pages that hold some of the bytes."""
        return range(start // PAGE, -(-stop // PAGE))

    def extent(self, page: int) -> tuple[int, int]:
        """Return where a page starts and stops; the last may be a short one."""
        return page * PAGE, min((page + 1) * PAGE, self.num_bytes)

    def is_intact(self, page: int, content: Bytes | bytes) -> bool:
        """Is this the content that was written?"""
        buffer = content if isinstance(content, bytes) else content.data
        return zlib.crc32(buffer) == int(self.checksums[page])


class Pages(Protocol):
    """Where a store's bytes come from: a folder, or object storage with a cache before it."""

    def read(self, spans: Sequence[ByteRange]) -> list[Bytes]:
        """Return the bytes of each span; what has changed since it was written is refused."""
        ...


class LocalPages:
    """Pages of the files of a folder. A page is checked when it is first touched, and never again in this process.

    Read, not mapped: a file that shrinks under a map kills the process, and what a map has touched stays in memory.
    """

    def __init__(self, folder: Path, files: Iterable[PagedFile]) -> None:
        self._folder = folder
        self._files = {file.name: file for file in files}
        self._open = LruCache[_Descriptor](MAX_OPEN_FILES)
        self._is_checked = {name: np.zeros(len(file.checksums), bool) for name, file in self._files.items()}
        for file in self._files.values():
            path = folder / file.name
            size = path.stat().st_size if path.is_file() else None
            if size != file.num_bytes:
                found = "is missing" if size is None else f"has {size:,} bytes"
                raise DataError(f"{path} {found}, not {file.num_bytes:,} bytes; prepare the data again")

    def read(self, spans: Sequence[ByteRange]) -> list[Bytes]:
        """Return the bytes of each span."""
        return [self._read(*span) for span in spans]

    def _read(self, name: str, start: int, stop: int) -> Bytes:
        pages = slice(start // PAGE, -(-stop // PAGE))
        if not self._is_checked[name][pages].all():
            self._check(self._files[name], start, stop)
        return self._bytes(name, start, stop)

    def _bytes(self, name: str, start: int, stop: int) -> Bytes:
        path = self._folder / name
        try:
            content = self._open.get(name, lambda: _Descriptor(path)).read(start, stop)
        except OSError as error:
            raise DataError(f"{path} can't be read ({error.strerror}); look at the disk, or copy it again") from error
        if len(content) < stop - start:
            raise DataError(f"{path} was cut short while it was read; copy it again or prepare the data again")
        return np.frombuffer(content, np.uint8)

    def _check(self, file: PagedFile, start: int, stop: int) -> None:
        for page in file.pages(start, stop):
            first, last = file.extent(page)
            if not file.is_intact(page, self._bytes(file.name, first, last)):
                raise DataError(
                    f"{self._folder / file.name} is damaged between bytes {first:,} and {last:,} (its checksum is "
                    "another than when it was written); copy it again or prepare the data again"
                )
            self._is_checked[file.name][page] = True


class _Descriptor:
    """A file that is open as long as somebody holds this."""

    def __init__(self, path: Path) -> None:
        self._number = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._number)

    def read(self, start: int, stop: int) -> bytes:
        # At a place of its own, so that a fork, which shares the descriptor, does not move it.
        return os.pread(self._number, stop - start, start)
