"""Work folders: where a preparation keeps its parts until all are complete, on a disk or in object storage.

The two classes have the same methods. A parameter `name` is a path within the folder, such as `parts/write-00000`.
All writes are atomic: another process, also on another machine, sees a whole file or none.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar, cast
from uuid import uuid4

from stretto.base.disk import fsync_folder, link_or_rename
from stretto.base.jitter import jitter
from stretto.base.remote import RemoteFolder, is_remote, join, retry, retry_if_exists
from stretto.store.file_writer import FileWriter, write_file
from stretto.store.pages import PagedFile

_RETRY_SECONDS = 60.0
_READ_BYTES = 1 << 20  # per request
_CREATE_PAUSES = (0.1, 0.2, 0.5, 1.0, 2.0)  # in seconds, on average
_FILES_AT_ONCE = 500  # are copied or read
PARTS = "parts"  # the subfolder of results, and of half-written files: a late writer leaves none of them in a store
LEADER = f"{PARTS}/leader"  # of the process that writes the folder, see `leader_lock`
_COPYING = f"{PARTS}/copying"
Result = TypeVar("Result")


@dataclass(frozen=True)
class LocalWorkFolder:
    """A folder on a local or shared filesystem. The store is made in it, then it gets the name of the target."""

    location: str
    target: str

    @property
    def path(self) -> Path:
        return Path(self.location)

    def read(self, name: str) -> bytes:
        """Return the content of a file; raise FileNotFoundError if it does not exist."""
        return (self.path / name).read_bytes()

    def read_many(self, names: Sequence[str]) -> Iterator[bytes]:
        """Yield the contents of those of some small files that can be read."""
        for name in names:
            with suppress(FileNotFoundError):
                yield self.read(name)

    def write(self, name: str, content: bytes) -> None:
        """Write a file; it replaces one of the same name."""
        with self.open_writer(name) as writer:
            writer.append(content)
            writer.finish()

    def create(self, name: str, content: bytes) -> bool:
        """Write a small file; return False if it exists already."""
        path, temporary = self.path / name, self.path / PARTS / f".{uuid4().hex}"
        path.parent.mkdir(exist_ok=True)
        try:
            temporary.write_bytes(content)
            return link_or_rename(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def open_writer(self, name: str) -> FileWriter:
        """Open a file for writing; it gets its name when it is finished."""
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        temporary = self.path / PARTS / f".{uuid4().hex}"
        return FileWriter(temporary, lambda written: written.replace(path), path.name)

    def open_reader(self, name: str) -> IO[bytes]:
        """Open a file for reading from its beginning."""
        return (self.path / name).open("rb")

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the names and sizes of the files in a folder; empty if it does not exist."""
        try:
            files = [entry for entry in os.scandir(self.path / folder) if entry.is_file(follow_symlinks=False)]
            return {entry.name: entry.stat().st_size for entry in files}
        except FileNotFoundError:
            return {}

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, if they exist."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def remove_all(self, is_kept: Callable[[str], bool]) -> None:
        """Remove all files but those whose name is to be kept, and the folders that are empty then."""
        for root, folders, files in os.walk(self.path, topdown=False):
            for name in (*files, *(folder for folder in folders if Path(root, folder).is_symlink())):
                path = Path(root, name)
                if not is_kept(path.relative_to(self.path).as_posix()):
                    path.unlink(missing_ok=True)
            is_used = is_kept(f"{Path(root).relative_to(self.path).as_posix()}/")
            if not is_used and not any(Path(root).iterdir()) and Path(root) not in (self.path, self.path / PARTS):
                Path(root).rmdir()

    def delete(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)

    def add_to_store(self, name: str, content: bytes) -> PagedFile:
        """Write a file of the store; return its name, size and checksums."""
        (self.path / name).parent.mkdir(exist_ok=True)
        return write_file(self.path / name, content)

    def move_to_store(self, new_names: Mapping[str, str]) -> None:
        """Give files of parts their names in the store."""
        for name, new_name in new_names.items():
            (self.path / new_name).parent.mkdir(exist_ok=True)
            (self.path / name).rename(self.path / new_name)

    def store_sizes(self, split: str) -> dict[str, int]:
        """Return the names and sizes of the files in the store of a split."""
        return self.sizes(split)

    def finish(self, fingerprint: str, indexes: Mapping[str, bytes]) -> None:
        """Write the indexes, and give the folder its final name: either all of the data is there or none of it."""
        for name, content in indexes.items():
            self.add_to_store(name, content)
        for folder in (*(path for path in self.path.iterdir() if path.is_dir()), self.path):
            # Parts that yielded no sequence or token leave files that no store uses.
            for unused in folder.glob("part-*"):
                unused.unlink()
            if folder != self.path and not any(folder.iterdir()):
                folder.rmdir()  # a split of an earlier start with other options
            else:
                fsync_folder(folder)
        target = Path(self.target)
        self.path.rename(target)
        # Only after the rename: without `parts`, an interrupted preparation would not be recognized as ours.
        shutil.rmtree(target / Path(fingerprint).parent)
        fsync_folder(target)
        fsync_folder(target.absolute().parent)


@dataclass(frozen=True)
class RemoteWorkFolder:
    """A folder in object storage, through fsspec. The store is made in the target, the indexes last."""

    location: str
    target: str
    # By process: a forked child can't use the parent's connection. Not pickled.
    _remotes: dict[int, tuple[RemoteFolder, str]] = field(default_factory=dict, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_remotes": {}}

    def read(self, name: str) -> bytes:
        content = self._request_if_exists(lambda filesystem: bytes(filesystem.cat_file(self._path(name))))
        if content is None:
            raise FileNotFoundError(name)
        return content

    def read_many(self, names: Sequence[str]) -> Iterator[bytes]:
        for start in range(0, len(names), _FILES_AT_ONCE):
            paths = [self._path(name) for name in names[start : start + _FILES_AT_ONCE]]
            contents = self._request(partial(_read_those_that_exist, paths))
            yield from map(bytes, contents.values())

    def write(self, name: str, content: bytes) -> None:
        self._request(lambda filesystem: filesystem.pipe_file(self._path(name), content))

    def create(self, name: str, content: bytes) -> bool:
        def request(filesystem: Any) -> bool:  # noqa: ANN401 - fsspec has no types
            first_error: Exception | None = None
            for pause in (*_CREATE_PAUSES, 0):
                try:
                    filesystem.pipe_file(self._path(name), content, mode="create")
                    return True
                except Exception as error:  # noqa: BLE001 - each filesystem has its own error for an existing file
                    first_error = first_error or error
                try:
                    # If it has our content, an earlier try wrote it and only the reply was lost.
                    return bytes(filesystem.cat_file(self._path(name))) == content
                except FileNotFoundError:
                    # A server may refuse two writers at the same time, and take neither.
                    time.sleep(jitter(pause) if pause else 0)
            assert first_error is not None
            raise first_error

        return self._request(request)

    def open_writer(self, name: str) -> FileWriter:
        return self._writer(join(self._open()[0].root, name))

    def open_reader(self, name: str) -> IO[bytes]:
        path = self._path(name)
        return cast("IO[bytes]", self._request(lambda filesystem: filesystem.open(path, "rb", block_size=_READ_BYTES)))

    def sizes(self, folder: str) -> dict[str, int]:
        return self._sizes(self._path(folder).rstrip("/"))

    def remove(self, names: Iterable[str]) -> None:
        self._remove([self._path(name) for name in names])

    def remove_all(self, is_kept: Callable[[str], bool]) -> None:
        self.remove(name for name in self.names() if not is_kept(name))

    def delete(self) -> None:
        self.remove(self.names())

    def add_to_store(self, name: str, content: bytes) -> PagedFile:
        with self._writer(join(self._open()[1], name)) as writer:
            writer.append(content)
            return writer.finish()

    def move_to_store(self, new_names: Mapping[str, str]) -> None:
        # From now on, files in the target are ours: a second start may remove them.
        self.write(_COPYING, b"")
        # The server copies them, many at a time. The parts stay until the store is complete. A missing one is an error.
        target, names = self._open()[1], list(new_names)
        for start in range(0, len(names), _FILES_AT_ONCE):  # each batch has its own retries
            batch = names[start : start + _FILES_AT_ONCE]
            sources, targets = [self._path(name) for name in batch], [join(target, new_names[name]) for name in batch]
            self._request(partial(_copy, sources, targets))

    def store_sizes(self, split: str) -> dict[str, int]:
        return self._sizes(join(self._open()[1], split).rstrip("/"))

    def finish(self, fingerprint: str, indexes: Mapping[str, bytes]) -> None:
        """Write the indexes, which make the files a store, then remove the work folder, but for the lock."""
        for name, content in indexes.items():
            self.add_to_store(name, content)
        # First the file that marks the folder as an unfinished preparation.
        self.remove([fingerprint])
        self.remove_all(lambda name: name == LEADER)

    def names(self) -> list[str]:
        """Return the names of all files."""
        return self._find(self._open()[0].root)

    def target_names(self) -> list[str]:
        """Return the names of all files in the target."""
        return self._find(self._open()[1])

    @property
    def has_begun_store(self) -> bool:
        """Whether an earlier start of this preparation has copied files to the target."""
        return _COPYING.rpartition("/")[2] in self.sizes(PARTS)

    def clear_target(self) -> None:
        """Remove what an earlier start of this preparation has copied to the target."""
        self._remove([join(self._open()[1], name) for name in self.target_names()])
        self.remove([_COPYING])

    def _writer(self, path: str) -> FileWriter:
        descriptor, temporary = tempfile.mkstemp(prefix="stretto-")
        os.close(descriptor)

        def upload(written: Path) -> None:
            self._request(lambda filesystem: filesystem.put_file(str(written), path))

        return FileWriter(Path(temporary), upload, path.rpartition("/")[2])

    def _find(self, root: str) -> list[str]:
        def request(filesystem: Any) -> list[str]:  # noqa: ANN401 - fsspec has no types
            filesystem.invalidate_cache()
            return list(filesystem.find(root))

        prefix = root.rstrip("/") + "/"
        paths = self._request_if_exists(request) or []
        return [path.removeprefix(prefix) for path in map(str, paths) if path.startswith(prefix)]

    def _remove(self, paths: list[str]) -> None:
        if paths:
            self._request_if_exists(lambda filesystem: filesystem.rm(paths))

    def _path(self, name: str) -> str:
        return join(self._open()[0].root, name)

    def _open(self) -> tuple[RemoteFolder, str]:
        process = os.getpid()
        if process not in self._remotes:
            self._remotes[process] = (RemoteFolder.open(self.location), RemoteFolder.open(self.target).root)
        return self._remotes[process]

    def _sizes(self, path: str) -> dict[str, int]:
        def request(filesystem: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - fsspec has no types
            filesystem.invalidate_cache()
            return list(filesystem.ls(path, detail=True))

        files = [entry for entry in self._request_if_exists(request) or [] if entry["type"] == "file"]
        return {str(entry["name"]).rpartition("/")[2]: int(entry["size"]) for entry in files}

    def _request_if_exists(self, request: Callable[[Any], Result]) -> Result | None:
        """Return None if what is requested does not exist."""
        return retry_if_exists(self.location, _RETRY_SECONDS, partial(request, self._open()[0].filesystem))

    def _request(self, request: Callable[[Any], Result]) -> Result:
        return retry(self.location, _RETRY_SECONDS, partial(request, self._open()[0].filesystem))


WorkFolder = LocalWorkFolder | RemoteWorkFolder


def _read_those_that_exist(paths: list[str], filesystem: Any) -> dict[str, Any]:  # noqa: ANN401 - fsspec has no types
    return dict(filesystem.cat(paths, on_error="omit"))


def _copy(sources: list[str], targets: list[str], filesystem: Any) -> None:  # noqa: ANN401 - fsspec has no types
    filesystem.copy(sources, targets)


def open_work_folder(target: Path | str) -> WorkFolder:
    """Return the folder `TARGET.partial` beside a target, which is a path or a URL."""
    target = Path(str(target).removeprefix("file://")) if str(target).startswith("file://") else target
    location = f"{str(target).rstrip('/')}.partial"
    return RemoteWorkFolder(location, str(target)) if is_remote(target) else LocalWorkFolder(location, str(target))


def join_location(location: Path | str, name: str) -> str:
    """Return the location of something in a folder, which is a path or a URL; the folder itself without a name."""
    if is_remote(location):
        return join(str(location), name) if name else str(location).rstrip("/")
    return str(Path(location) / name)
