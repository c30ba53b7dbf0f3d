"""Scratch: folders for files that nobody needs for long; those of processes that were killed are removed."""

import hashlib
import os
import re
import shutil
import socket
import tempfile
import weakref
from pathlib import Path

_NAME = re.compile(r"stretto-([0-9a-f]{8})-(\d+)-")


def make_scratch_folder() -> "tempfile.TemporaryDirectory[str]":
    """Return a new folder, to be used in a `with`."""
    _remove_stale()
    return tempfile.TemporaryDirectory(prefix=_prefix())


def scratch_folder_of(owner: object) -> Path:
    """Return a new folder that goes when its owner goes."""
    _remove_stale()
    folder = Path(tempfile.mkdtemp(prefix=_prefix()))
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    return folder


def _prefix() -> str:
    return f"stretto-{_host_id()}-{os.getpid()}-"


def _host_id() -> str:
    """Name what gives a process its number: this host, and its container if there is one."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{socket.gethostname()} {namespace}".encode()).hexdigest()[:8]


def _remove_stale() -> None:
    """Remove what processes of this user have left that are no more."""
    for path in Path(tempfile.gettempdir()).glob("stretto-*"):
        found = _NAME.match(path.name)
        if found is not None and found[1] == _host_id() and not _is_alive(int(found[2])) and _is_owned_by_user(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _is_owned_by_user(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not path.is_symlink()
