"""Fingerprint: a hash of the values that a result depends on."""

import hashlib
import json


def fingerprint(values: object) -> str:
    """Return the SHA-256 of plain values, written as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
