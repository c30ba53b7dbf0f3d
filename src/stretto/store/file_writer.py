"""FileWriter: writes a file of a store and computes the checksum of each of its pages."""

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from stretto.store.pages import PAGE_BYTES, PagedFile


@dataclass
class FileWriter:
    """An append-only file; `finish` returns its size and checksums for the index."""

    path: Path
    # Gives the complete file at `path` its name in a store, such as by an upload; None: it is written there at once.
    publish: Callable[[Path], object] | None = None
    name: str = ""  # in the store; that of `path` if there is no `publish`
    num_bytes: int = 0
    _checksums: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._file = self.path.open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file, finished or not; remove it if it was to be published."""
        self._file.close()
        if self.publish is not None:
            self.path.unlink(missing_ok=True)

    def append(self, values: NDArray[Any] | bytes) -> None:
        """Append bytes, or the bytes of an array."""
        content = memoryview(values if isinstance(values, bytes) else np.ascontiguousarray(values).tobytes())
        self._file.write(content)
        while len(content):
            free_bytes = PAGE_BYTES - self.num_bytes % PAGE_BYTES  # left in the current page
            part, content = content[:free_bytes], content[free_bytes:]
            if free_bytes == PAGE_BYTES:  # a new page starts
                self._checksums.append(0)
            self._checksums[-1] = zlib.crc32(part, self._checksums[-1])
            self.num_bytes += len(part)

    def finish(self) -> PagedFile:
        """Flush the file to disk, close and publish it; return its name, size and checksums."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if self.publish is not None:
            self.publish(self.path)
        return PagedFile(self.name or self.path.name, self.num_bytes, np.array(self._checksums, np.uint32))


def write_file(path: Path, content: bytes) -> PagedFile:
    """Write a whole file and flush it to disk; return its name, size and checksums."""
    with FileWriter(path) as writer:
        writer.append(content)
        return writer.finish()
