"""Sealed JSON: a small tree that carries a digest of itself, so that a flipped bit does not pass for a number."""

import hashlib
import json
from typing import Any

JsonObject = dict[str, Any]
_CHECKSUM_KEY = "sha256"


def add_checksum(tree: JsonObject) -> JsonObject:
    """Return the tree with a digest of itself."""
    return {**tree, _CHECKSUM_KEY: _checksum(tree)}


def verify_checksum(tree: object) -> JsonObject:
    """Return the tree without its digest; ValueError if it isn't the one that was sealed."""
    if not isinstance(tree, dict):
        raise ValueError("it is no object")
    rest = {name: value for name, value in tree.items() if name != _CHECKSUM_KEY}
    if tree.get(_CHECKSUM_KEY) != _checksum(rest):
        raise ValueError("its digest is another than when it was written")
    return rest


def dump_with_checksum(tree: JsonObject) -> bytes:
    """Return the text of a sealed tree."""
    return json.dumps(add_checksum(tree), indent=1, allow_nan=False).encode()


def load_with_checksum(content: bytes) -> JsonObject:
    """Return the tree of a sealed text; ValueError if it isn't one, or not as it was sealed."""
    if not content:
        raise ValueError("it is empty")
    try:
        return verify_checksum(json.loads(content))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _checksum(tree: JsonObject) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
