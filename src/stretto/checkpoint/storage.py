"""Storage: a local folder or object storage for checkpoints, with a create-only write to commit them."""

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from stretto.base.bounded_read import read_bounded
from stretto.base.disk import fsync_folder, link_or_rename
from stretto.base.errors import DataError
from stretto.base.redact import without_secrets
from stretto.base.remote import RemoteFolder, is_remote, join, retry, retry_if_exists
from stretto.base.scratch import scratch_folder_of
from stretto.checkpoint.manifest import MANIFEST, damaged_error

Result = TypeVar("Result")


class LocalStorage:
    """A folder on a local or shared filesystem that contains folders of files; a parameter `name` is `folder/file`."""

    def __init__(self, root: Path) -> None:
        self.location = str(root)
        self._root = root

    def names(self, folder: str = "") -> list[str]:
        """Return the names of the files and folders in a folder, sorted; an empty list if it does not exist."""
        try:
            return sorted(path.name for path in (self._root / folder).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, name: str) -> bytes:
        """Return the content of a small file; raise FileNotFoundError if it does not exist."""
        path = self._root / name
        _reject_symlinks(path.parent, path)
        return read_bounded(path)

    def create(self, name: str, content: bytes) -> bool:
        """Write a small file atomically and durably; return False if it exists already."""
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _reject_symlinks(path.parent)
        # The file gets its name when it is complete, so a crash never leaves half a file.
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".partial-", delete=False) as file:
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).chmod(path.parent.stat().st_mode & 0o666)  # tempfile sets 0o600
                return link_or_rename(Path(file.name), path)
            finally:
                Path(file.name).unlink(missing_ok=True)
                fsync_folder(path.parent)

    def open_folder(self, folder: str) -> Path:
        """Return a local folder to write files to; `store` then adds them to the storage."""
        path = self._root / folder
        path.mkdir(parents=True, exist_ok=True)
        fsync_folder(self._root)
        # The folder may already exist, with links that writing would follow.
        _reject_symlinks(path, *path.iterdir())
        return path

    def store(self, folder: str, paths: Iterable[Path]) -> None:
        """Add files to the storage that the caller has written to `open_folder(folder)` and synced to disk."""
        for path in paths:
            # Whoever may read the folder may read its files, whatever the umask of this process is.
            path.chmod(path.parent.stat().st_mode & 0o666)
        fsync_folder(self._root / folder)

    def read_range(self, name: str, start: int, stop: int, num_bytes: int) -> bytearray:
        """Return the bytes from `start` to `stop` of a file; raise DataError unless the file has `num_bytes`."""
        path = self._root / name
        try:
            _reject_symlinks(path.parent, path)
            # Without O_NONBLOCK, opening a named pipe would wait for a writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise damaged_error(str(path), "it is not a file")
                if status.st_size != num_bytes:
                    raise damaged_error(str(path), f"it has {status.st_size:,} bytes, not {num_bytes:,}")
                return _read_at(descriptor, start, stop)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            raise damaged_error(str(path), "it is missing") from None
        except OSError as error:
            raise damaged_error(str(path), f"it can't be read: {error.strerror}") from None

    def drop_from_cache(self, name: str) -> None:
        """Drop a file that was synced from the system's cache, so that the next read comes from the disk, on Linux."""
        if sys.platform == "linux":
            descriptor = os.open(self._root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)

    def remove(self, folder: str) -> None:
        """Remove a folder and its files if it exists and isn't a symbolic link."""
        path = self._root / folder
        if not path.is_symlink():
            # Remove the manifest first: a half-removed checkpoint must look incomplete, not damaged.
            (path / MANIFEST).unlink(missing_ok=True)
            with suppress(FileNotFoundError):  # another process removes it, too
                shutil.rmtree(path)


class RemoteStorage:
    """A folder in object storage, through fsspec, with the same methods as LocalStorage."""

    def __init__(self, location: str, retry_seconds: float) -> None:
        self.location = without_secrets(location)  # for messages, logs and claims, and to compare
        self._retry_seconds = retry_seconds
        self._remote = RemoteFolder.open(location)
        self._scratch: Path | None = None  # holds files to upload; created when needed

    def names(self, folder: str = "") -> list[str]:
        root = join(self._remote.root, folder).rstrip("/")
        paths = self._read_or_none(lambda: self._remote.filesystem.ls(root, detail=False, refresh=True)) or []
        # Some filesystems list the folder itself, too.
        return sorted({str(path).rstrip("/").rsplit("/", 1)[-1] for path in paths} - {root.rsplit("/", 1)[-1]})

    def read(self, name: str) -> bytes:
        content = self._read_or_none(lambda: self._remote.cat(name))
        if content is None:
            raise FileNotFoundError(name)
        return content

    def create(self, name: str, content: bytes) -> bool:
        path = join(self._remote.root, name)

        def request() -> bool:
            try:
                self._remote.filesystem.pipe_file(path, content, mode="create")
            except Exception as error:  # noqa: BLE001 - each filesystem has its own error for an existing file
                try:
                    # If it has our content, an earlier attempt wrote it and only the reply was lost; else it existed.
                    return self._remote.cat(name) == content
                except FileNotFoundError:
                    raise error from None
            return True

        return self._retry(request)

    def open_folder(self, folder: str) -> Path:
        self._scratch = self._scratch or scratch_folder_of(self)
        for leftover in self._scratch.iterdir():  # from a save that failed
            shutil.rmtree(leftover, ignore_errors=True)
        path = self._scratch / folder
        path.mkdir(exist_ok=True)
        return path

    def store(self, folder: str, paths: Iterable[Path]) -> None:
        for path in paths:
            target = join(self._remote.root, f"{folder}/{path.name}")
            self._retry(partial(self._remote.filesystem.put_file, str(path), target))
            path.unlink()

    def read_range(self, name: str, start: int, stop: int, num_bytes: int) -> bytearray:
        where = f"{self.location}/{name}"
        # One byte more than the file should have: the answer tells whether it is longer.
        end = stop + 1 if stop == num_bytes else stop
        path = join(self._remote.root, name)

        def request() -> bytes:
            try:
                return bytes(self._remote.filesystem.cat_file(path, start=start, end=end))
            except FileNotFoundError:
                raise
            except Exception:
                # A server refuses a range after the end of an object; don't try that again.
                size = int(self._remote.filesystem.info(path, refresh=True)["size"])
                if size <= start:
                    raise short(size) from None
                raise

        def short(size: int) -> DataError:
            return damaged_error(where, f"it has {size:,} bytes, not {num_bytes:,}")

        content = self._read_or_none(request)
        if content is None:
            raise damaged_error(where, "it is missing")
        if len(content) > stop - start:
            raise damaged_error(where, f"it has more than {num_bytes:,} bytes")
        if len(content) < stop - start:
            raise short(start + len(content))
        return bytearray(content)

    def drop_from_cache(self, name: str) -> None:
        pass  # nothing is cached

    def remove(self, folder: str) -> None:
        path = join(self._remote.root, folder)
        names = self.names(folder)
        if MANIFEST in names:
            self._retry(lambda: self._remote.filesystem.rm_file(join(path, MANIFEST)))
        if names:
            self._retry(lambda: self._remote.filesystem.rm(path, recursive=True))

    def _read_or_none(self, request: Callable[[], Result]) -> Result | None:
        """Return the result of a read request, retried if it fails; None if the file or folder does not exist."""
        return retry_if_exists(self.location, self._retry_seconds, request)

    def _retry(self, request: Callable[[], Result]) -> Result:
        return retry(self.location, self._retry_seconds, request)


Storage = LocalStorage | RemoteStorage


def open_storage(location: Path | str, retry_seconds: float = 300.0) -> Storage:
    """Return the storage at a path or URL."""
    return RemoteStorage(str(location), retry_seconds) if is_remote(location) else LocalStorage(Path(location))


def _read_at(descriptor: int, start: int, stop: int) -> bytearray:
    """Return the bytes from `start` to `stop` of an open file, or up to its end if that comes first."""
    content, position = bytearray(stop - start), 0
    view = memoryview(content)
    while count := os.preadv(descriptor, [view[position:]], start + position):
        position += count
    view.release()
    del content[position:]
    return content


def _reject_symlinks(*paths: Path) -> None:
    for path in paths:
        if path.is_symlink():
            raise DataError(f"{path} is a symbolic link; if you trust its target, replace the link with it")
