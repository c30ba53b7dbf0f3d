"""The folders of a job: checks that target and work folder may be written, and keeps what can be resumed."""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stretto.base.errors import DataError
from stretto.prepare.leader_lock import LeaderLock, read_or_empty
from stretto.prepare.work_folder import LEADER, PARTS, LocalWorkFolder, RemoteWorkFolder, WorkFolder
from stretto.store.index import INDEX

FINGERPRINT = f"{PARTS}/fingerprint"
# What a start has before its fingerprint, and what a worker of an earlier start may write after its end: the lock, a
# half-written file, the files of ranks, a result and a file of a part.
_OWN_NAME = re.compile(
    rf"{PARTS}/(leader|copying|\.[0-9a-f]{{32}}|[0-9a-f]{{16}}(/.*)?|\w+-[0-9a-f]{{16}}-\d+|vocabulary\.[0-9a-f]{{64}})"
    r"|(\w+/)?part-\d{5,}-[0-9a-f]{12}\.\w+"
)


@contextmanager
def exclusive(folder: WorkFolder) -> Iterator[None]:
    """Check the target and the `.partial` folder, create it, and let no other process of this machine use it."""
    check_folders(folder)
    if isinstance(folder, LocalWorkFolder):
        (folder.path / PARTS).mkdir(parents=True, exist_ok=True)
        with _locked(folder.path):
            yield
    else:
        yield


def check_folders(folder: WorkFolder) -> None:
    """Reject a target that has content, and a `.partial` folder that is not an unfinished preparation."""
    check_target(folder)
    if isinstance(folder, LocalWorkFolder):
        _check_partial(folder.path)
        return
    names = folder.names()
    if FINGERPRINT not in names and not all(map(_OWN_NAME.fullmatch, names)):
        raise _foreign(folder.location)


def begin(folder: WorkFolder, expected: bytes, token: str) -> None:
    """Prepare the folder for a start, whose process holds the lock; keep the finished parts of earlier starts."""
    check_target(folder)  # another process may have completed it
    if isinstance(folder, RemoteWorkFolder) and folder.has_begun_store:
        folder.clear_target()
    resume_or_clear(folder, expected, token)


def check_target(folder: WorkFolder) -> None:
    """Reject a target unless it is a folder that is new or empty."""
    if isinstance(folder, RemoteWorkFolder):
        names = folder.target_names()
        if names and not folder.has_begun_store:
            is_store = any(name.rpartition("/")[2] == INDEX for name in names)
            problem = "already holds prepared data" if is_store else "already exists and is not an empty folder"
            raise DataError(f"{folder.target} {problem}; choose a different folder, or delete it first")
        return
    target = Path(folder.target)
    if (target / INDEX).exists() or any(target.glob(f"*/{INDEX}")):
        raise DataError(f"{target} already holds prepared data; choose a different folder, or delete it first")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise DataError(f"{target} already exists and is not an empty folder; choose a different one")


def _check_partial(folder: Path) -> None:
    """Reject a `.partial` folder that is the user's own, not an unfinished preparation."""
    parts = folder / PARTS
    is_ours = not folder.exists()
    if folder.is_dir() and not parts.is_symlink():
        # A preparation that was interrupted before it wrote its fingerprint has only the lock and files of its ranks.
        # Listed first, as another rank may be writing: a file of a preparation is younger than its fingerprint. Unlike
        # `rglob`, `os.walk` does not mind a folder that another rank removes.
        paths = [Path(root, name) for root, folders, files in os.walk(folder) for name in (*folders, *files)]
        names = [path.relative_to(folder).as_posix() for path in paths if path != parts]
        is_ours = (folder / FINGERPRINT).is_file() or all(map(_OWN_NAME.fullmatch, names))
    if folder.is_symlink() or not is_ours:
        raise _foreign(str(folder))


def _foreign(folder: str) -> DataError:
    return DataError(
        f"{folder} already exists and is not an unfinished preparation; move it away or choose a different folder"
    )


def resume_or_clear(folder: WorkFolder, expected: bytes, token: str) -> None:
    """Keep the finished parts of a preparation by this version of the format; delete others."""

    def is_of_this_start(name: str) -> bool:
        return name == LEADER or name.startswith(f"{PARTS}/{token}/")

    if read_or_empty(folder, FINGERPRINT) == expected:
        folder.remove_all(lambda name: _is_kept(name) or is_of_this_start(name))
        return
    # The file marks the folder as ours, so it exists throughout: empty while the old parts are deleted.
    folder.write(FINGERPRINT, b"")
    folder.remove_all(lambda name: name == FINGERPRINT or is_of_this_start(name))
    folder.write(FINGERPRINT, expected)


def _is_kept(name: str) -> bool:
    """Whether a file belongs to a finished part.

    Not kept: files that were moved into the store already, since with changed input files, the store may have fewer of
    them; in `parts`, half a file of a start that was killed, and what its ranks left there.
    """
    folder, _, file = name.rpartition("/")
    return file.startswith("part-") or (folder == PARTS and not file.startswith(".") and name != LEADER)


def _is_result(name: str) -> bool:
    return name.rpartition("-")[2].isdecimal()


def clean_up(folder: WorkFolder, error: BaseException, lock: LeaderLock) -> None:
    """After an error, keep what belongs to finished parts; leave nothing behind if there is nothing to resume."""
    if isinstance(folder, LocalWorkFolder) and not folder.path.exists():
        return  # it has its final name
    folder.remove_all(lambda name: _is_kept(name) or name == LEADER)
    if isinstance(error, DataError) and not any(map(_is_result, folder.sizes(PARTS))):
        lock.stop_beating()
        folder.delete()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            remedy = "wait for it or choose a different folder"
            raise DataError(f"{folder} is being written by another process; {remedy}") from None
        yield
    finally:
        os.close(descriptor)
