"""SinkState: remembers what sinks need when the run resumes, in a small file."""

import json
from pathlib import Path

from stretto.base.bounded_read import parse_json, read_bounded
from stretto.base.disk import write_atomic
from stretto.base.errors import DataError
from stretto.base.run_folder import SINK_STATE


class SinkState:
    """Strings by name, in a JSON file in a folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / SINK_STATE

    def read(self, name: str) -> str | None:
        """Return the string stored under a name; None if there is none, or the file can't be read."""
        value = self._load().get(name)
        return value if isinstance(value, str) else None

    def write(self, name: str, text: str) -> None:
        """Store a string under a name."""
        write_atomic(self._path, json.dumps({**self._load(), name: text}, indent=2).encode() + b"\n")

    def _load(self) -> dict[str, object]:
        try:
            tree = parse_json(read_bounded(self._path))
        except (OSError, ValueError, DataError):
            return {}
        return tree if isinstance(tree, dict) else {}
