"""Keys: whole numbers that name a place in a run, from which all of its randomness is derived."""

import hashlib


def derive(key: int, *path: int | str) -> int:
    """Return the key of a place below `key`: the same on every rank, machine and version of Python."""
    text = ":".join(map(str, (key, *path)))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    # 63 bits, so that a key always fits a signed int64 tensor.
    return int.from_bytes(digest, "little") >> 1
