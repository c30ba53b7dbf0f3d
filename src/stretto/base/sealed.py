"""Sealed JSON: a small tree that carries a digest of itself, so that a flipped bit does not pass for a number."""

import hashlib
import json
from typing import Any

Tree = dict[str, Any]
_SEAL = "sha256"


def seal(tree: Tree) -> Tree:
    """Return the tree with a digest of itself."""
    return {**tree, _SEAL: _digest(tree)}


def unseal(tree: object) -> Tree:
    """Return the tree without its digest; ValueError if it isn't the one that was sealed."""
    if not isinstance(tree, dict):
        raise ValueError("it is no object")
    rest = {name: value for name, value in tree.items() if name != _SEAL}
    if tree.get(_SEAL) != _digest(rest):
        raise ValueError("its digest is another than when it was written")
    return rest


def dump_sealed(tree: Tree) -> bytes:
    """Return the text of a sealed tree."""
    return json.dumps(seal(tree), indent=1, allow_nan=False).encode()


def load_sealed(content: bytes) -> Tree:
    """Return the tree of a sealed text; ValueError if it isn't one, or not as it was sealed."""
    if not content:
        raise ValueError("it is empty")
    try:
        return unseal(json.loads(content))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _digest(tree: Tree) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
