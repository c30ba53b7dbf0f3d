"""RankStore: a key-value store of short texts that all ranks share, with a time limit on every call."""

from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import TypeVar

from stretto.base.errors import LostPeerError
from stretto.mesh.c10d import Store
from stretto.mesh.timeouts import OperationTimeoutError, call_with_timeout, poll

Value = TypeVar("Value")


class RankStore:
    """A torch Store whose calls time out. torch's own calls wait forever while the network to the store is interrupted.

    A store usually answers in well under a millisecond. If a call takes longer than `seconds`, it and all later calls
    raise OperationTimeoutError. If the process that hosts the store has ended, calls raise torch's RuntimeError.
    """

    def __init__(self, store: Store, seconds: float = 20.0) -> None:
        # Use a separate connection, because a call blocks all others on the same one.
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._seconds = seconds
        self._numbers = count()
        self.is_unreachable = False

    def get(self, key: str) -> str | None:
        """Return the value of a key; None if it has none."""
        return self._call(lambda: self._store.get(key).decode() if self._store.check([key]) else None)

    def set(self, key: str, value: str) -> None:
        """Set the value of a key."""
        self._call(lambda: self._store.set(key, value))

    def set_once(self, key: str, value: str) -> bool:
        """Set a key unless it has a value; return whether its value is now `value`."""
        # compare_set takes an expected value of "" to mean that the key has none.
        return self._call(lambda: self._store.compare_set(key, "", value).decode() == value)

    def delete(self, key: str) -> None:
        """Delete a key."""
        self._call(lambda: self._store.delete_key(key))

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the integer at a key, which starts at 0, and return the sum."""
        return self._call(lambda: self._store.add(key, amount))

    def wait_for_keys(self, keys: list[str], seconds: float) -> bool:
        """Wait up to `seconds` for all keys to have a value; return whether they do."""
        return not keys or poll(lambda: self._call(lambda: self._store.check(keys)), seconds)

    def wait_for_message(self, key: str, source: int, timeout: timedelta, raise_if_failed: Callable[[], None]) -> str:
        """Return the value that rank `source` sets for `key`; call `raise_if_failed` repeatedly while waiting."""

        def is_set() -> bool:
            if self._call(lambda: self._store.check([key])):
                return True
            raise_if_failed()
            return False

        try:
            if poll(is_set, timeout.total_seconds(), max_pause=0.5):
                return self.get(key) or ""
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

    def _call(self, call: Callable[[], Value]) -> Value:
        if self.is_unreachable:
            raise OperationTimeoutError("the store did not answer an earlier call")
        try:
            return call_with_timeout(self._seconds, call)
        except OperationTimeoutError:
            self.is_unreachable = True
            raise
