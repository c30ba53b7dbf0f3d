"""What is in a file of W&B: records in blocks, each with a checksum, a length and whether it goes on in the next."""

import json
import struct
import time
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # which of its versions fits is found out when it is imported

BLOCK, HEADER = 32768, 7
FULL, LAST = 1, 4


def read_history(path: Path) -> list[dict[str, float]]:
    """Return the rows of a run's history, each with its `_step`, as far as the file goes."""
    rows = []
    for content in _records(path.read_bytes()):
        record = Record.FromString(content)
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            rows.append({name: json.loads(value) for name, value in items.items()})
    return rows


def await_exit_code(path: Path, seconds: float = 10) -> int | None:
    """Return how a run has ended; W&B's service writes it down a moment after the run has."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        records = [Record.FromString(content) for content in _records(path.read_bytes())]
        codes = [int(record.exit.exit_code) for record in records if record.HasField("exit")]
        if codes:
            return codes[0]
        time.sleep(0.05)
    return None


def _records(content: bytes) -> list[bytes]:
    found, parts, place = [], b"", HEADER
    while place + HEADER <= len(content):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        if place + HEADER + length > len(content):
            break
        parts += content[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (FULL, LAST):
            found.append(parts)
            parts = b""
    return found
