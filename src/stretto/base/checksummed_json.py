"""JSON objects that contain their own checksum, so that a flipped bit is not read as a different number."""

import json
from typing import Any

from stretto.base.bounded_read import parse_json
from stretto.base.fingerprint import fingerprint

JsonObject = dict[str, Any]
_CHECKSUM_KEY = "sha256"


def add_checksum(tree: JsonObject) -> JsonObject:
    """Return the object with its SHA-256 added."""
    return {**tree, _CHECKSUM_KEY: fingerprint(tree)}


def verify_checksum(tree: object) -> JsonObject:
    """Return the object without its checksum; ValueError if it is not an object or the checksum does not match."""
    if not isinstance(tree, dict):
        raise ValueError("it is not a JSON object")  # only the reason: callers add the name of the file
    values = {name: value for name, value in tree.items() if name != _CHECKSUM_KEY}
    if tree.get(_CHECKSUM_KEY) != fingerprint(values):
        raise ValueError("checksum mismatch")
    return values


def dump_with_checksum(tree: JsonObject) -> bytes:
    """Return the object, with its checksum added, as UTF-8 JSON."""
    return json.dumps(add_checksum(tree), separators=(",", ":"), allow_nan=False).encode()


def load_with_checksum(content: bytes) -> JsonObject:
    """Return the object in a JSON file's content; ValueError if it is malformed or its checksum does not match."""
    if not content:
        raise ValueError("it is empty")
    return verify_checksum(parse_json(content))
