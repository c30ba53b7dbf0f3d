"""Storage: a local folder or object storage for checkpoints, with a create-only write to commit them."""

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

from stretto.base.bounded_read import read_bounded
from stretto.base.disk import fsync_folder, link_or_rename
from stretto.base.errors import DataError
from stretto.base.remote import RemoteFolder, is_remote, join, retry, retry_if_exists
from stretto.base.scratch import scratch_folder_of
from stretto.checkpoint.manifest import MANIFEST, CheckpointFile, damaged_error

Result = TypeVar("Result")
OnBytes = Callable[[int], None]  # called with the number of bytes just read
_READ_BYTES = 1 << 20  # per read while hashing


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
            # safetensors creates files that only their owner can read; use the permissions of their folder instead.
            path.chmod(path.parent.stat().st_mode & 0o666)
        fsync_folder(self._root / folder)

    def fetch(self, folder: str, file: CheckpointFile, into: Path, on_bytes: OnBytes = lambda count: None) -> Path:
        """Verify a file's checksum; return its local path, which is in `into` if the file had to be downloaded."""
        path = self._root / folder / file.name
        check_file(path, file, on_bytes)
        return path

    def remove(self, folder: str) -> None:
        """Remove a folder and its files if it exists and isn't a symbolic link."""
        path = self._root / folder
        if not path.is_symlink():
            # Remove the manifest first: a half-removed checkpoint must look incomplete, not damaged.
            (path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


class RemoteStorage:
    """A folder in object storage, through fsspec, with the same methods as LocalStorage."""

    def __init__(self, location: str, retry_seconds: float) -> None:
        self.location = location
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

    def fetch(self, folder: str, file: CheckpointFile, into: Path, on_bytes: OnBytes = lambda count: None) -> Path:
        path, name = into / file.name, f"{folder}/{file.name}"
        where = f"{self.location}/{name}"
        error = damaged_error(where, f"it has more than {file.num_bytes:,} bytes")
        self._read_or_none(lambda: self._remote.download(name, path, file.num_bytes, error))
        # This also raises if the file does not exist.
        check_file(path, file, on_bytes, where)
        return path

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


def check_file(
    path: Path, file: CheckpointFile, on_bytes: OnBytes = lambda count: None, where: str | None = None
) -> None:
    """Raise DataError if a file (`where` in the message) is missing or damaged; `on_bytes` is passed to `digest_of`."""
    where = where or str(path)
    try:
        _reject_symlinks(path.parent, path)
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise damaged_error(where, "it is not a file")
        if status.st_size != file.num_bytes:
            raise damaged_error(where, f"it has {status.st_size:,} bytes, not {file.num_bytes:,}")
        if digest_of(path, on_bytes) != file.sha256:
            raise damaged_error(where, "checksum mismatch")
    except FileNotFoundError:
        raise damaged_error(where, "it is missing") from None
    except OSError as error:
        raise damaged_error(where, f"it can't be read: {error.strerror}") from None


def digest_of(path: Path, on_bytes: OnBytes = lambda count: None) -> str:
    """Return the SHA-256 of a file in hexadecimal; after each read, `on_bytes` is called with the number of bytes."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while content := file.read(_READ_BYTES):
            digest.update(content)
            on_bytes(len(content))
    return digest.hexdigest()


def _reject_symlinks(*paths: Path) -> None:
    for path in paths:
        if path.is_symlink():
            raise DataError(f"{path} is a symbolic link; if you trust its target, replace the link with it")
