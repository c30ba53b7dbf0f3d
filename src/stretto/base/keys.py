"""Keys: whole numbers that name a place in a run, from which all of its randomness is derived."""

import hashlib
import json


def derive_key(key: int, *path: int | str) -> int:
    """Return the key of a place below `key`: the same on every rank, machine and version of Python."""
    # As JSON, so that 1 and "1", or "a:b" and "a", "b", are not the same place.
    digest = hashlib.blake2b(json.dumps([key, *path]).encode(), digest_size=8).digest()
    # 63 bits, so that a key always fits a signed int64 tensor.
    return int.from_bytes(digest, "little") >> 1
