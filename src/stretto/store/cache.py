"""Cache: pages of remote files on a local disk, up to a size limit."""

import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stretto.base.disk import write_atomic
from stretto.base.errors import DataError
from stretto.store.pages import PAGE_BYTES

MIN_BYTES = 8 * PAGE_BYTES  # also the minimum of data.cache_bytes
# Evict down to this fraction of the limit: scanning the folder is the expensive part, so do it rarely.
KEPT_FRACTION = 0.9


@dataclass(frozen=True)
class Cache:
    """A folder for pages of remote files, and its maximum size; all ranks and workers of a node share it."""

    folder: Path = Path("~/.cache/stretto")
    max_bytes: int = 1 << 30
    retry_seconds: float = 300.0  # how long a failed request for remote data is retried

    def __post_init__(self) -> None:
        if self.max_bytes < MIN_BYTES:
            raise DataError(f"max_bytes={self.max_bytes:,} is too small; use at least {MIN_BYTES:,}")
        if not self.retry_seconds >= 0:  # not `< 0`, which would accept NaN
            raise DataError(f"retry_seconds={self.retry_seconds} must be at least 0")

    def create(self) -> None:
        """Create the folder if it does not exist."""
        try:
            self._page_folder.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError) as error:  # RuntimeError: `~` can't be expanded
            raise DataError(f"data.cache={self.folder} can't be created ({error}); choose a different folder") from None

    def get(self, key: str) -> bytes | None:
        """Return a page, or None if it is not cached or can't be read; the caller verifies the content."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        # The time of last use decides which pages are evicted. A read-only cache can't store it, but evicts nothing.
        with suppress(OSError):
            os.utime(path)
        return content

    def put(self, key: str, content: bytes) -> None:
        """Cache a page; raise OSError if it can't be written (full disk, read-only folder)."""
        descriptor = os.open(self._page_folder / "size", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            # Only writers take the lock. For readers, `write_atomic` makes a page appear whole or not at all.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            self._reserve(descriptor, len(content))
            # What a power loss damages is fetched again, so no rank of the node waits for the disk here.
            write_atomic(self._path(key), content, sync=False)
        finally:
            os.close(descriptor)

    @property
    def _page_folder(self) -> Path:
        return self.folder.expanduser() / "pages"

    def _path(self, key: str) -> Path:
        return self._page_folder / f"{key}.page"

    def _reserve(self, descriptor: int, num_bytes: int) -> None:
        """Add the `num_bytes` to be written to the total in the `size` file; if that exceeds `max_bytes`, evict pages.

        The total is an upper bound, since a page may be deleted, or written twice; `_evict` counts the bytes exactly.
        """
        content = os.pread(descriptor, 32, 0)
        total = int(content) if content.isdigit() else self.max_bytes  # new or damaged: let `_evict` count
        if total + num_bytes > self.max_bytes:
            total = self._evict(int(self.max_bytes * KEPT_FRACTION) - num_bytes)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(total + num_bytes).encode(), 0)

    def _evict(self, max_left: int) -> int:
        """Delete the least recently used pages until at most `max_left` bytes are left; return how many are left."""
        pages = []
        with os.scandir(self._page_folder) as entries:
            for entry in entries:
                # A killed process leaves a partial page behind.
                if Path(entry.name).suffixes[:1] == [".page"]:
                    with suppress(FileNotFoundError):
                        status = entry.stat()
                        pages.append((status.st_mtime_ns, status.st_size, entry.path))
        total = sum(size for _, size, _ in pages)
        for _, size, path in sorted(pages):
            if total <= max_left:
                break
            Path(path).unlink(missing_ok=True)
            total -= size
        return total
