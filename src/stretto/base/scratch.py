"""Scratch: folders for files that nobody needs for long; those of processes that were killed are removed."""

import os
import re
import shutil
import tempfile
from pathlib import Path

_NAME = re.compile(r"stretto-(\d+)-")


def make_scratch() -> "tempfile.TemporaryDirectory[str]":
    """Return a new folder for this process, which goes with the object; first tidy up after others of this user."""
    for path in Path(tempfile.gettempdir()).glob("stretto-*"):
        found = _NAME.match(path.name)
        if found is not None and not _is_alive(int(found[1])) and _is_own(path):
            shutil.rmtree(path, ignore_errors=True)
    return tempfile.TemporaryDirectory(prefix=f"stretto-{os.getpid()}-")


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _is_own(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not path.is_symlink()
