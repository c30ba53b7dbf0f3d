"""Keys: integers from which the randomness of each part of a run is derived."""

import hashlib
import json


def derive_key(key: int, *path: int | str) -> int:
    """Return a new key derived from `key` and `path`. It is the same on every rank, machine and Python version."""
    # As JSON, so that 1 and "1", or ("a:b",) and ("a", "b"), give different keys.
    digest = hashlib.blake2b(json.dumps([key, *path]).encode(), digest_size=8).digest()
    # 63 bits, so that a key always fits a signed int64 tensor.
    return int.from_bytes(digest, "little") >> 1
