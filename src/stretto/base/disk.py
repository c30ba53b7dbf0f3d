"""Writes files atomically, reports file-system errors, and syncs folders to the disk."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from stretto.base.errors import ConfigError

# `os.link` raises one of these on filesystems where a file can't have a second name.
NO_HARD_LINK_ERRORS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def fsync_folder(folder: Path) -> None:
    """Wait until the entries of a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some filesystems can't sync a folder
            raise
    finally:
        os.close(descriptor)


@contextmanager
def atomic_path(path: Path, *, sync: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside `path`. It is renamed to `path` at the end, or removed after an error.

    Each writer has a temporary path of its own. With `sync`, a power loss leaves the old content or the new.
    """
    partial = path.with_name(f"{path.name}.{uuid4().hex}.partial")
    try:
        yield partial
        if sync:
            with partial.open("rb") as file:
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if sync:
        fsync_folder(path.parent)


def write_atomic(path: Path, content: bytes, *, sync: bool = True, is_private: bool = False) -> None:
    """Write a file so that other processes see all of the new content or none of it, see `atomic_path`."""
    with atomic_path(path, sync=sync) as partial:
        partial.touch(0o600 if is_private else 0o666)
        partial.write_bytes(content)


def link_or_rename(temporary: Path, path: Path) -> bool:
    """Give a file its final name; return False if a file of that name exists already. `temporary` may remain."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in NO_HARD_LINK_ERRORS:
            raise
        # Without hard links, reserve the name with an empty file, then replace it. A crash in between leaves it empty.
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        temporary.replace(path)
    return True


@contextmanager
def explain_write_errors(target: Path | str, remedy: str = "choose a different file") -> Iterator[None]:
    """Turn a file-system error into a ConfigError that names the target: a path, or `parameter=path`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{target} can't be written ({error.strerror or error}); {remedy}") from None


def refuse_existing(parameter: str, path: Path) -> None:
    """Raise if an output file already exists, so that a typo never overwrites a result."""
    try:
        exists = path.exists()
    except OSError:
        return  # the path can't be checked; writing the file reports why
    if exists:
        raise ConfigError(f"{parameter}={path} already exists; choose a different path, or delete it")
