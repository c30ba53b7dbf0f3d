"""Fingerprint: a hash of plain values, to find out whether any of them has changed."""

import hashlib
import json


def fingerprint(values: object) -> str:
    """Return the SHA-256 of plain values, written as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
