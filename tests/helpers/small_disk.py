"""A small disk, for tests that fill it."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from helpers.train_process import end_started_runs


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """Make a folder, and mount a disk of this size there; skip the test if this user may not."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        assert "CI" not in os.environ
        pytest.skip("only root can mount a small disk")
    try:
        yield folder
    finally:
        end_started_runs()  # a disk that is in use can't be unmounted
        subprocess.run(["umount", str(folder)], check=True)


def fill_disk(path: Path) -> None:
    """Append to a file until its disk is full."""
    with path.open("ab", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(1 << 12))
