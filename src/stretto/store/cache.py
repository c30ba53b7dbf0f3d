"""Cache: pages of remote files kept on a local disk, at most so many bytes of them."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from stretto.base.errors import DataError
from stretto.store.pages import PAGE

MIN_BYTES = 8 * PAGE
# When there is no more room, so much of it is made at once: looking through the folder is the dear part.
_KEPT_FRACTION = 0.9


@dataclass(frozen=True)
class Cache:
    """Where pages are kept and how much room they have; all ranks and workers of a machine share it."""

    folder: Path = Path("~/.cache/stretto")
    num_bytes: int = 1 << 30
    retry_seconds: float = 300.0  # seconds that a server may be away

    def __post_init__(self) -> None:
        if self.num_bytes < MIN_BYTES:
            raise DataError(f"data.cache_bytes={self.num_bytes:,} is too small; give it {MIN_BYTES:,} or more")
        if not self.retry_seconds >= 0:
            raise DataError(f"data.retry_seconds={self.retry_seconds} is no number of seconds; give it 0 or more")

    def create(self) -> None:
        """Make the folder, if it isn't there."""
        try:
            self._pages.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError) as error:
            raise DataError(f"data.cache={self.folder} can't be made ({error}); give another folder") from None

    def get(self, key: str) -> bytes | None:
        """Return a page if it is here and can be read; whoever asks checks what it gets."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        # A folder that can't be written to still serves, in the order of writing instead of use.
        with suppress(OSError):
            os.utime(path)
        return content

    def put(self, key: str, content: bytes) -> None:
        """Keep a page; an OSError says that it can't be kept, on a full disk or in a folder for reading only."""
        path = self._path(key)
        # Another thread or process may read or write the same page: none may ever see a part of one.
        unfinished = path.with_name(f"{key}.{os.getpid()}.{os.urandom(4).hex()}.page")
        with self._locked_size() as tally:
            tally.reserve(len(content))
            try:
                unfinished.write_bytes(content)
                unfinished.replace(path)
            finally:
                unfinished.unlink(missing_ok=True)

    @property
    def _pages(self) -> Path:
        return self.folder.expanduser() / "pages"

    def _path(self, key: str) -> Path:
        return self._pages / f"{key}.page"

    @contextmanager
    def _locked_size(self) -> Iterator["_SizeCounter"]:
        """Hold the count of the folder's bytes, which one process at a time may do."""
        descriptor = os.open(self._pages / "size", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield _SizeCounter(self._pages, self.num_bytes, descriptor)
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class _SizeCounter:
    """How many bytes of pages there are at most, in a locked file; counted anew when the room is used up."""

    pages: Path
    num_bytes: int
    descriptor: int

    def reserve(self, num_bytes: int) -> None:
        """Count some bytes that are about to be written, and drop the pages not used for longest if need be."""
        written = os.pread(self.descriptor, 32, 0)
        count = int(written) if written.isdigit() else self.num_bytes
        if count + num_bytes > self.num_bytes:
            count = self._drop(int(self.num_bytes * _KEPT_FRACTION) - num_bytes)
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, str(count + num_bytes).encode(), 0)

    def _drop(self, num_bytes: int) -> int:
        """Drop the pages not used for longest until so many bytes are left; return how many are."""
        found = []
        with os.scandir(self.pages) as entries:
            for entry in entries:
                if entry.name.endswith(".page"):
                    with suppress(FileNotFoundError):
                        status = entry.stat()
                        found.append((status.st_mtime_ns, status.st_size, entry.path))
        count = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if count <= num_bytes:
                break
            Path(path).unlink(missing_ok=True)
            count -= size
        return count
