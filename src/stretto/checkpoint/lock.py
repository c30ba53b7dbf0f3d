"""FolderLock: one run per folder, for as long as its process lives."""

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
# A process that was just killed may still hold the lock.
_LOCK_TIMEOUT_SECONDS = 5.0
_held: set[Path] = set()


class FolderLock:
    """A lock that the system releases when the process ends, however that happens."""

    def __init__(self, folder: Path, seconds: float = _LOCK_TIMEOUT_SECONDS) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder.resolve() / LOCK
        # The system would give this process the lock twice, and release it when either is closed.
        if path in _held:
            raise _in_use(folder, f"process {os.getpid()}, which is this one")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        until = time.monotonic() + seconds
        while not _try_lock(descriptor):
            if time.monotonic() > until:
                who = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                os.close(descriptor)
                raise _in_use(folder, who or "another process")
            time.sleep(0.1)
        _held.add(path)
        # Released with the run, if nobody does so before.
        self.release = weakref.finalize(self, _release, path, descriptor)
        with contextlib.suppress(OSError):
            # Shown to whoever is refused; a full disk is no reason to fail here.
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        # A filesystem without locks: generations still keep two runs apart, when one of them saves.
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    return True


def _release(path: Path, descriptor: int) -> None:
    _held.discard(path)
    os.close(descriptor)


def _in_use(folder: Path, who: str) -> ConfigError:
    return ConfigError(f"{folder} is in use by {who}; wait for that run to end, or choose a different folder")
