"""RemotePath: a file behind a URL that workers read where they are, instead of a download on one machine.

A worker reads the byte ranges of its parts, as a stream. Libraries that want the name of a file, as those for Parquet
and arrays, get a copy in the cache of downloads of their machine.
"""

import io
import os
from pathlib import Path
from typing import Any, NamedTuple, Self

from stretto.base.errors import DataError
from stretto.base.fingerprint import fingerprint
from stretto.base.redact import without_secrets
from stretto.base.remote import RemoteFolder, retry_if_exists
from stretto.prepare.downloads import VERSION_KEYS, localize, remote_name

_BLOCK_BYTES = 4 << 20  # per request
_BUFFER_BYTES = 1 << 18
_RETRY_SECONDS = 60.0


class RemoteStatus(NamedTuple):
    """What a preparation uses of the status of a file."""

    st_size: int
    st_mtime_ns: int  # not a time, but a number that changes with the version of the file


class RemotePath(type(Path())):  # type: ignore[misc]
    """The path in a URL, with what a preparation uses of a `Path`."""

    url: str
    _status: RemoteStatus

    @classmethod
    def of_url(cls, url: str) -> Self:
        """Return the path of a file; raise if there is none at the URL."""
        path = cls(remote_name(url))
        path.url = url
        remote = RemoteFolder.open(url)
        info: dict[str, Any] = _request(url, lambda: remote.filesystem.info(remote.root))
        if info.get("type") == "directory" or info.get("size") is None:
            problem = "is a folder, or its size is unknown"
            raise DataError(f"{url} {problem}; use the URLs of files")
        version = {key: str(info[key]) for key in VERSION_KEYS if info.get(key) is not None}
        path._status = RemoteStatus(int(info["size"]), int(fingerprint(version)[:15], 16))
        return path

    def __reduce__(self) -> tuple[Any, ...]:
        # With the status, so that a worker sends no request for it, and all agree on the version.
        return _restore, (self.url, tuple(self._status))

    def __eq__(self, other: object) -> bool:
        # Not the path alone, which files on two servers may share.
        return isinstance(other, RemotePath) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __str__(self) -> str:
        return without_secrets(self.url)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __fspath__(self) -> str:
        return str(localize(self.url))

    def absolute(self) -> Self:
        return self

    def is_file(self) -> bool:
        return True

    def is_dir(self) -> bool:
        return False

    def stat(self) -> RemoteStatus:
        return self._status

    def open(self, mode: str = "rb") -> io.BufferedReader:
        assert mode == "rb", "files of users are only read"
        return io.BufferedReader(_RemoteStream(self.url, self._status.st_size), _BUFFER_BYTES)


def _restore(url: str, status: tuple[int, int]) -> RemotePath:
    path = RemotePath(remote_name(url))
    path.url, path._status = url, RemoteStatus(*status)
    return path


class _RemoteStream(io.RawIOBase):
    """The bytes of a file, requested block by block."""

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size, self._remote = url, size, RemoteFolder.open(url)
        self._position, self._block, self._block_start = 0, b"", 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401 - any writable buffer
        view = memoryview(buffer).cast("B")
        if not self._block_start <= self._position < self._block_start + len(self._block):
            start, stop = self._position, min(self._position + _BLOCK_BYTES, self._size)
            if start >= stop:
                return 0
            filesystem, root = self._remote
            self._block = bytes(_request(self._url, lambda: filesystem.cat_file(root, start=start, end=stop)))
            self._block_start = start
            if len(self._block) != stop - start:
                problem = f"has {len(self._block):,} bytes where {stop - start:,} were requested, so it has changed"
                raise DataError(f"{self._url} {problem}; start the preparation again")
        offset = self._position - self._block_start
        content = self._block[offset : offset + len(view)]
        view[: len(content)] = content
        self._position += len(content)
        return len(content)


def _request(url: str, request: Any) -> Any:  # noqa: ANN401 - fsspec has no types
    result = retry_if_exists(url, _RETRY_SECONDS, request)
    if result is None:
        raise DataError(f"{url} can't be found; check the URL")
    return result
