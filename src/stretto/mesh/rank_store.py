"""RankStore: short texts by key, shared by all ranks without a collective. No call waits longer than its time limit."""

from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import TypeVar

from stretto.base.errors import LostPeerError
from stretto.mesh.c10d import Store
from stretto.mesh.timeouts import OperationTimeoutError, call_with_timeout, poll

Value = TypeVar("Value")


class RankStore:
    """One of torch's stores, which would wait forever for a host that an interrupted network hides.

    A store answers in well under a millisecond. If it hasn't for `seconds`, this call and all later ones raise
    OperationTimeoutError; if the store is gone they raise torch's RuntimeError.
    """

    def __init__(self, store: Store, seconds: float = 20.0) -> None:
        # A connection of its own: a call blocks all others on the same connection.
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
        """Set the value of a key that has none yet; return whether its value is now `value`."""
        return self._call(lambda: self._store.compare_set(key, "", value).decode() == value)

    def delete(self, key: str) -> None:
        """Delete a key."""
        self._call(lambda: self._store.delete_key(key))

    def add(self, key: str, amount: int) -> int:
        """Add to the integer at a key, 0 at first; return the sum."""
        return self._call(lambda: self._store.add(key, amount))

    def wait_for_keys(self, keys: list[str], seconds: float) -> bool:
        """Wait until all of these keys have a value; return whether they have."""
        return not keys or poll(lambda: self._call(lambda: self._store.check(keys)), seconds)

    def wait_for_message(self, key: str, source: int, timeout: timedelta, check: Callable[[], None]) -> str:
        """Wait for the value that rank `source` will set; `check` raises if waiting has become useless."""

        def is_there() -> bool:
            if self._call(lambda: self._store.check([key])):
                return True
            check()
            return False

        try:
            if poll(is_there, timeout.total_seconds(), max_pause=0.5):
                return self.get(key) or ""
        except RuntimeError as error:
            raise LostPeerError(
                "the ranks' store is gone, and with it its host: the launcher, or rank 0; restart the run"
            ) from error
        raise LostPeerError(
            f"rank {source} sent no message for {timeout.total_seconds():.0f} s; check that rank's output, or raise "
            "run.timeout"
        )

    def next_number(self) -> int:
        """Return 0, 1, 2, ... on every rank alike, so that users of the store can choose different keys."""
        return next(self._numbers)

    def _call(self, call: Callable[[], Value]) -> Value:
        if self.is_unreachable:
            raise OperationTimeoutError("the store has not answered before")
        try:
            return call_with_timeout(self._seconds, call)
        except OperationTimeoutError:
            self.is_unreachable = True
            raise
