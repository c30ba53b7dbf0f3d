"""RankStore: a key-value store of short texts that all ranks share, with a time limit on every call."""

from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import TypeVar

from stretto.base.errors import LostPeerError, MeshError
from stretto.mesh.signed_store import SignedStore
from stretto.mesh.timeouts import OperationTimeoutError, call_with_timeout, poll

Value = TypeVar("Value")


class RankStore:
    """A SignedStore whose calls time out. torch's own wait forever while the network to the store is interrupted.

    A store usually answers in well under a millisecond. If a call takes longer than `seconds`, it and all later calls
    raise OperationTimeoutError. If the process that hosts the store has ended, calls raise torch's RuntimeError.
    """

    def __init__(self, store: SignedStore, seconds: float = 20.0) -> None:
        # Use a separate connection, because a call blocks all others on the same one.
        self._store = store.clone()
        self._seconds = seconds
        self._numbers = count()
        self.is_unreachable = False

    def get(self, key: str) -> str | None:
        """Return the value of a key; None if it has none, or one that no rank of this run has signed."""
        return self._call(lambda: self._store.get(key))

    def set(self, key: str, value: str) -> None:
        """Set the value of a key."""
        self._call(lambda: self._store.set(key, value))

    def set_once(self, key: str, value: str) -> bool:
        """Set a key unless a rank has set it; return whether its value is now `value`."""
        return self._call(lambda: self._store.set_once(key, value))

    def delete(self, key: str) -> None:
        """Delete a key."""
        self._call(lambda: self._store.delete(key))

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the integer at a key, which starts at 0, and return the sum."""
        return self._call(lambda: self._store.add(key, amount))

    def wait_for_keys(self, keys: list[str], seconds: float) -> bool:
        """Wait up to `seconds` for all keys to have a value; return whether they do."""
        return not keys or poll(lambda: self._call(lambda: self._store.check_signed(keys)), seconds)

    def wait_for_message(self, key: str, source: int, timeout: timedelta, raise_if_failed: Callable[[], None]) -> str:
        """Return the value that rank `source` sets for `key`; call `raise_if_failed` repeatedly while waiting."""

        def is_set() -> bool:
            if self._call(lambda: self._store.check([key])):
                return True
            raise_if_failed()
            return False

        try:
            if poll(is_set, timeout.total_seconds(), max_pause=0.5):
                return self._read_message(key)
        except RuntimeError as error:
            raise LostPeerError(
                "the ranks' key-value store does not answer: its host (the launcher or rank 0) has ended or can't be "
                "reached; restart the run"
            ) from error
        raise LostPeerError(
            f"rank {source} sent no message for {timeout.total_seconds():.0f} s; check that rank's output, or raise "
            "run.timeout"
        )

    def next_number(self) -> int:
        """Return 0, 1, 2, ... Ranks that make the same calls get equal numbers, for keys that they share."""
        return next(self._numbers)

    def _read_message(self, key: str) -> str:
        message = self.get(key)
        if message is None:
            # An error, because if the rank waited on, anyone who can write to the store could stop the run silently.
            raise MeshError(
                f"{key} in the ranks' key-value store is not signed with this run's secret, so it is not from its "
                "ranks; find out who can connect to the store, then restart the run"
            )
        return message

    def _call(self, call: Callable[[], Value]) -> Value:
        if self.is_unreachable:
            raise OperationTimeoutError("the store did not answer an earlier call")
        try:
            return call_with_timeout(self._seconds, call)
        except OperationTimeoutError:
            self.is_unreachable = True
            raise
