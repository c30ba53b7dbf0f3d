"""SignedStore: a key-value store of short texts, where each text is signed with the secret of the run.

torch's store has no login: any process that can connect to it can write. So a rank stores a signature before each text,
and ignores a text without a valid one. The signature covers the run, the launch and the key, so that a text can't be
copied to another key or from an earlier launch:

    key      <launch id>/error
    value    <HMAC-SHA256 of secret; scope, key, text><text>

A rank can't tell if someone deletes a key or puts back an earlier text of the same key. Counters can't be signed. So
neither may decide more than how long a rank waits.
"""

import hmac
import json
from collections.abc import Mapping
from datetime import timedelta

from stretto.mesh.c10d import PrefixStore, Store

_SIGNATURE_LENGTH = 64  # SHA-256 in hexadecimal


class SignedStore:
    """A torch Store with signed texts. Without a secret, nothing is signed and every text is accepted."""

    def __init__(self, store: Store, secret: bytes | None = None, scope: str = "") -> None:
        self.unsigned = store  # for torch's own keys, counters, and the start of a rendezvous
        self._secret = secret
        self._scope = scope

    def in_scope(self, name: str) -> "SignedStore":
        """Return a store whose keys start with `name`."""
        return SignedStore(PrefixStore(name, self.unsigned), self._secret, f"{self._scope}/{name}")

    def clone(self) -> "SignedStore":
        """Return a store with its own connection."""
        return SignedStore(self.unsigned.clone(), self._secret, self._scope)  # type: ignore[attr-defined]

    def get(self, key: str) -> str | None:
        """Return the text of a key; None if it has none, or one that no rank of this run has signed."""
        return self.verify(key, self.unsigned.get(key)) if self.unsigned.check([key]) else None

    def wait_for(self, key: str, timeout: timedelta) -> str | None:
        """Wait until a key has a value; return its text, or None if no rank of this run has signed it."""
        self.unsigned.wait([key], timeout)
        return self.verify(key, self.unsigned.get(key))

    def get_all(self, keys: list[str]) -> list[str | None]:
        """Return the texts of keys that all have a value, in one call; None for those that are not signed."""
        return [self.verify(key, value) for key, value in zip(keys, self.unsigned.multi_get(keys), strict=True)]

    def set(self, key: str, text: str) -> None:
        """Set the text of a key."""
        self.unsigned.set(key, self.sign(key, text))

    def set_all(self, texts: Mapping[str, str]) -> None:
        """Set the texts of several keys, in one call."""
        values = [self.sign(key, text) for key, text in texts.items()]
        self.unsigned.multi_set(list(texts), values)  # type: ignore[attr-defined]

    def set_once(self, key: str, text: str) -> bool:
        """Set a key unless a rank has set it; return whether its text is now `text`."""
        signed = self.sign(key, text)
        # compare_set takes an expected value of "" to mean that the key has none.
        value = self.unsigned.compare_set(key, "", signed)
        if self.verify(key, value) is None:
            # Not from a rank. Otherwise anyone could keep an error from being published.
            self.unsigned.set(key, signed)
            return True
        return value == signed.encode()

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have a value, signed or not."""
        return self.unsigned.check(keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until all keys have a value, signed or not."""
        self.unsigned.wait(keys, timeout)

    def delete(self, key: str) -> None:
        """Delete a key."""
        self.unsigned.delete_key(key)

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the integer at a key, which starts at 0, and return the sum. It is not signed."""
        return self.unsigned.add(key, amount)

    def sign(self, key: str, text: str) -> str:
        """Return a text with the signature that makes it valid at `key`."""
        return f"{self._signature(key, text)}{text}"

    def verify(self, key: str, value: bytes) -> str | None:
        """Return the text of a value; None if its signature is not valid."""
        decoded = value.decode(errors="replace")
        if self._secret is None:
            return decoded
        signature, text = decoded[:_SIGNATURE_LENGTH], decoded[_SIGNATURE_LENGTH:]
        return text if hmac.compare_digest(signature.encode(), self._signature(key, text).encode()) else None

    def _signature(self, key: str, text: str) -> str:
        if self._secret is None:
            return ""
        # JSON, so that no two different lists of texts have the same bytes.
        return hmac.digest(self._secret, json.dumps([self._scope, key, text]).encode(), "sha256").hex()
