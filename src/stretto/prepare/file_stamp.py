"""Stamps of input files: path, size and modification time, to find out whether a file has changed."""

from collections.abc import Sequence
from pathlib import Path

from stretto.base.fingerprint import fingerprint


def stat_files(paths: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Return path, size and modification time of each file, and of each file in a folder."""
    files: list[Path] = []
    for path in paths:
        files += sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def file_stamp(path: Path) -> str:
    """Return a text that changes when a file is modified, or any file in a folder."""
    return fingerprint(stat_files([path]))
