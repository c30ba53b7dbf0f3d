"""The folders of a job: checks that target and work folder may be written, and keeps what can be resumed."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stretto.base.errors import DataError
from stretto.base.remote import without_secrets
from stretto.prepare.launcher_ranks import LEADER, check_no_leader, read_or_empty
from stretto.prepare.work_folder import PARTS, LocalWorkFolder, RemoteWorkFolder, WorkFolder
from stretto.store.index import INDEX

FINGERPRINT = f"{PARTS}/fingerprint"


@contextmanager
def exclusive(folder: WorkFolder) -> Iterator[None]:
    """Check the target and the `.partial` folder, create it, and let no other process use it within the context."""
    if isinstance(folder, LocalWorkFolder):
        check_target(folder)
        _check_partial(folder.path)
        (folder.path / PARTS).mkdir(parents=True, exist_ok=True)
        with _locked(folder.path):
            yield
        return
    names = folder.names()
    if names and FINGERPRINT not in names:
        raise _foreign(without_secrets(folder.location))
    check_no_leader(folder)
    check_target(folder)
    if folder.has_begun_store:
        folder.clear_target()
    yield


def check_target(folder: WorkFolder) -> None:
    """Reject a target unless it is a folder that is new or empty."""
    if isinstance(folder, RemoteWorkFolder):
        names = folder.target_names()
        if names and not folder.has_begun_store:
            is_store = any(name.rpartition("/")[2] == INDEX for name in names)
            problem = "already holds prepared data" if is_store else "already exists and is not an empty folder"
            raise DataError(
                f"{without_secrets(folder.target)} {problem}; choose a different folder, or delete it first"
            )
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
        # A preparation that was interrupted before it wrote its fingerprint has at most an empty `parts`.
        is_ours = (folder / FINGERPRINT).is_file() or all(path == parts for path in folder.rglob("*"))
    if folder.is_symlink() or not is_ours:
        raise _foreign(str(folder))


def _foreign(folder: str) -> DataError:
    return DataError(
        f"{folder} already exists and is not an unfinished preparation; move it away or choose a different folder"
    )


def resume_or_clear(folder: WorkFolder, expected: bytes) -> None:
    """Keep the finished parts of the same preparation; delete those of a different one."""
    if read_or_empty(folder, FINGERPRINT) == expected:
        folder.remove_all(_is_kept)
        return
    # The file marks the folder as ours, so it exists throughout: empty while the old parts are deleted.
    folder.write(FINGERPRINT, b"")
    folder.remove_all(lambda name: name == FINGERPRINT)
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


def clean_up(folder: WorkFolder, error: BaseException) -> None:
    """After an error, keep what belongs to finished parts; leave nothing behind if there is nothing to resume."""
    if isinstance(folder, LocalWorkFolder) and not folder.path.exists():
        return  # it has its final name
    folder.remove_all(_is_kept)
    if isinstance(error, DataError) and not any(map(_is_result, folder.sizes(PARTS))):
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
