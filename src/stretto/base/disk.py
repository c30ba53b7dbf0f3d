"""Disk: what it takes for a name in a folder to outlive a power cut."""

import os
from pathlib import Path


def fsync_folder(folder: Path) -> None:
    """Wait until the names in a folder are safe on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, as far as other processes see it."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    partial.replace(path)
