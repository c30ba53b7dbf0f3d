"""Writer: the files of a store, with a checksum of each page, complete or not there at all."""

import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from stretto.store.index import CHECKSUMS, INDEX, make_index
from stretto.store.pages import PAGE, PagedFile


@dataclass
class FileWriter:
    """A file that is only appended to; it knows the checksum of each page."""

    path: Path
    num_bytes: int = 0
    _checksums: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._file = self.path.open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file, finished or not."""
        self._file.close()

    def append(self, values: NDArray[Any] | bytes) -> None:
        """Write some values as they lie in memory."""
        content = memoryview(values if isinstance(values, bytes) else np.ascontiguousarray(values).tobytes())
        self._file.write(content)
        while len(content):
            room = PAGE - self.num_bytes % PAGE
            part, content = content[:room], content[room:]
            if room == PAGE:
                self._checksums.append(0)
            self._checksums[-1] = zlib.crc32(part, self._checksums[-1])
            self.num_bytes += len(part)

    def finish(self) -> PagedFile:
        """Close the file when it is safe on the disk; return what the index has to know of it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return PagedFile(self.path.name, self.num_bytes, np.array(self._checksums, np.uint32))


def write_file(path: Path, content: bytes) -> PagedFile:
    """Write a small file at once."""
    with FileWriter(path) as writer:
        writer.append(content)
        return writer.finish()


def write_index(folder: Path, kind: str, fields: dict[str, Any], files: Iterable[PagedFile]) -> None:
    """Write what makes some files a store: the checksums of all their pages, and last of all the index."""
    listed = list(files)
    checksums = np.concatenate([file.checksums for file in listed]).astype("<u4").tobytes()
    write_file(folder / CHECKSUMS, checksums)
    tree = make_index(kind, fields, listed, checksums)
    write_file(folder / INDEX, json.dumps(tree, indent=1).encode())
