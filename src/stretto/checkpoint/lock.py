"""FolderLock: keeps a second launch out of a folder until the first releases the lock or its process ends."""

import contextlib
import errno
import fcntl
import os
import socket
import time
import weakref
from pathlib import Path

from stretto.base.errors import ConfigError

LOCK = "lock"
_LOCK_TIMEOUT_SECONDS = 5.0  # a process that was just killed may still hold the lock
_held: set[Path] = set()  # the lock files that this process has locked


class FolderLock:
    """A lock on a file in a folder. The operating system releases it when the process ends, even if it is killed."""

    def __init__(self, folder: Path, timeout_seconds: float = _LOCK_TIMEOUT_SECONDS) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder.resolve() / LOCK
        # A POSIX lock belongs to the process: it can lock a file twice, and closing either descriptor unlocks the file.
        if path in _held:
            raise _in_use_error(folder, "this process", "close that run or CheckpointManager first")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        deadline = time.monotonic() + timeout_seconds
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                os.close(descriptor)
                raise _in_use_error(folder, owner or "another process")
            time.sleep(0.1)
        _held.add(path)
        # Python calls `release` when this object is deleted or the process exits, unless it was called before.
        self.release = weakref.finalize(self, _release, path, descriptor)
        with contextlib.suppress(OSError):
            # A process that can't get the lock shows this text in its error. A full disk is no reason to fail here.
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES (POSIX allows both): it is locked
        return False
    except OSError as error:
        # Go on if the filesystem has no locks: the older of two launches stops at its next save, as a newer one exists.
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    return True


def _release(path: Path, descriptor: int) -> None:
    _held.discard(path)
    os.close(descriptor)


def _in_use_error(folder: Path, owner: str, remedy: str = "wait for that run to end") -> ConfigError:
    return ConfigError(f"{folder} is in use by {owner}; {remedy}, or choose a different folder")
