"""Fingerprint: one short text for what a result depends on; equal values give equal fingerprints."""

import hashlib
import json


def fingerprint(values: object) -> str:
    """Return the SHA-256 of plain values, written as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
