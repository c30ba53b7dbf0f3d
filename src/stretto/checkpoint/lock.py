"""Lock: one run in a folder at a time, as long as its process lives."""

import errno
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import Self

from stretto.base.errors import ConfigError

LOCK = "lock"
# A rank that was killed a moment ago may not be gone yet.
_SECONDS = 5.0
_held: set[Path] = set()


class FolderLock:
    """A lock that the system lets go of when its process ends, however that happens."""

    def __init__(self, folder: Path, seconds: float = _SECONDS) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder.resolve() / LOCK
        # The system would let this very process have it twice, and lose it when either is closed.
        if self._path in _held:
            raise _in_use(folder, f"process {os.getpid()}, which is this one")
        self._file = self._path.open("a+")
        until = time.monotonic() + seconds
        while not self._take():
            if time.monotonic() > until:
                self._file.seek(0)
                who = self._file.read(200).strip() or "another process"
                self._file.close()
                raise _in_use(folder, who)
            time.sleep(0.1)
        _held.add(self._path)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def _take(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            # A filesystem without locks: generations still keep two runs apart, when one of them saves.
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
        return True

    def release(self) -> None:
        """Let others have it."""
        _held.discard(self._path)
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _in_use(folder: Path, who: str) -> ConfigError:
    return ConfigError(f"{folder} is in use by {who}; wait for that run to end, or choose another folder")
