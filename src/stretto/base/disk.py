"""Disk: what it takes for a name in a folder to outlive a power cut."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are safe on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
