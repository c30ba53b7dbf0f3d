"""Creates temporary folders, and removes those that killed processes have left behind."""

import hashlib
import os
import re
import shutil
import socket
import tempfile
import weakref
from pathlib import Path

_NAME = re.compile(r"stretto-([0-9a-f]{8})-(\d+)-")  # host id, process id


def make_scratch_folder() -> "tempfile.TemporaryDirectory[str]":
    """Return a new temporary folder, as a context manager."""
    _remove_stale()
    return tempfile.TemporaryDirectory(prefix=_prefix())


def scratch_folder_of(owner: object) -> Path:
    """Return a new temporary folder that is removed when `owner` is garbage-collected."""
    _remove_stale()
    folder = Path(tempfile.mkdtemp(prefix=_prefix()))
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    return folder


def _prefix() -> str:
    return f"stretto-{_host_id()}-{os.getpid()}-"


def _host_id() -> str:
    """Return an id for this host and container, within which process ids are unique."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{socket.gethostname()} {namespace}".encode()).hexdigest()[:8]


def _remove_stale() -> None:
    """Remove the folders that dead processes of this user have left behind."""
    for path in Path(tempfile.gettempdir()).glob("stretto-*"):
        match = _NAME.match(path.name)
        if match is not None and match[1] == _host_id() and not _is_alive(int(match[2])) and _is_own_folder(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        # A process of another user can't be signaled, but it is alive.
        return not isinstance(error, ProcessLookupError)
    return True


def _is_own_folder(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and not path.is_symlink()
