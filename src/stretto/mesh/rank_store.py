"""RankStore: a key-value store of short texts that all ranks share, with a time limit on every call."""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from itertools import count
from typing import TypeVar

from torch.distributed import DistStoreError

from stretto.base.errors import LostPeerError, MeshError
from stretto.mesh.signed_store import SignedStore
from stretto.mesh.timeouts import OperationTimeoutError, call_with_timeout

Value = TypeVar("Value")

_WAIT_SECONDS = 1.0  # how often a rank that waits for a message looks whether another has failed


class RankStore:
    """A SignedStore whose calls time out. torch's own wait forever while the network to the store is interrupted.

    A store usually answers in well under a millisecond. If a call takes longer than `seconds`, it and all later calls
    raise OperationTimeoutError. If the process that hosts the store has ended, calls raise torch's RuntimeError.
    """

    def __init__(self, store: SignedStore, seconds: float = 20.0) -> None:
        self._store = store
        self._seconds = seconds
        self._numbers = count()
        self.is_unreachable = False

    def get(self, key: str) -> str | None:
        """Return the value of a key; None if it has none, or one that no rank of this run has signed."""
        return self._call(lambda: self._store.get(key))

    def get_all(self, keys: list[str]) -> list[str | None]:
        """Return the values of keys that all have one, in one call; None for those that no rank has signed."""
        return self._call(lambda: self._store.get_all(keys)) if keys else []

    def set(self, key: str, value: str) -> None:
        """Set the value of a key."""
        self._call(lambda: self._store.set(key, value))

    def set_once(self, key: str, value: str) -> bool:
        """Set a key unless a rank has set it; return whether its value is now `value`."""
        return self._call(lambda: self._store.set_once(key, value))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have a value, signed or not."""
        return self._call(lambda: self._store.check(keys))

    def delete(self, key: str) -> None:
        """Delete a key."""
        self._call(lambda: self._store.delete(key))

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the integer at a key, which starts at 0, and return the sum."""
        return self._call(lambda: self._store.add(key, amount))

    def wait_for_keys(
        self, keys: list[str], seconds: float, raise_if_failed: Callable[[], None] = lambda: None
    ) -> bool:
        """Wait up to `seconds` for all keys to have a value; return whether they do.

        `raise_if_failed` is called now and then, and may raise an error that ends the wait.
        """
        # A connection of its own, because a call blocks all others on the same one.
        store = self._call(self._store.clone)
        deadline = time.monotonic() + seconds
        while True:
            # In short waits: a thread that waits in torch's C++ while the process ends would abort it.
            remaining = min(max(0.01, deadline - time.monotonic()), _WAIT_SECONDS)
            try:
                self._call(partial(store.wait, keys, timedelta(seconds=remaining)), self._seconds + remaining)
                return True
            except DistStoreError:  # the time was up
                raise_if_failed()
                if time.monotonic() >= deadline:
                    return False

    def wait_for_messages(
        self, keys: Mapping[int, str], timeout: timedelta, raise_if_failed: Callable[[], None]
    ) -> list[str]:
        """Return the values that ranks set for their `keys`; `raise_if_failed` is called repeatedly while waiting."""
        names = list(keys.values())
        try:
            if self.wait_for_keys(names, timeout.total_seconds(), raise_if_failed):
                return [_check_signed(key, value) for key, value in zip(names, self.get_all(names), strict=True)]
            missing = list(keys)[first_missing(self.check, names)]
        except RuntimeError as error:
            raise _lost_store_error() from error
        raise LostPeerError(
            f"rank {missing} sent no message for {timeout.total_seconds():.0f} s; check that rank's output, or raise "
            "run.timeout"
        )

    def wait_for_message(self, key: str, source: int, timeout: timedelta, raise_if_failed: Callable[[], None]) -> str:
        """Return the value that rank `source` sets for `key`, as `wait_for_messages`."""
        return self.wait_for_messages({source: key}, timeout, raise_if_failed)[0]

    def next_number(self) -> int:
        """Return 0, 1, 2, ... Ranks that make the same calls get equal numbers, for keys that they share."""
        return next(self._numbers)

    def _call(self, call: Callable[[], Value], seconds: float | None = None) -> Value:
        if self.is_unreachable:
            raise OperationTimeoutError("the store did not answer an earlier call")
        try:
            return call_with_timeout(seconds or self._seconds, call)
        except OperationTimeoutError:
            self.is_unreachable = True
            raise


def first_missing(check: Callable[[list[str]], bool], keys: list[str]) -> int:
    """Return the index of the first key without a value, if there is one, in about log2(number of keys) calls."""
    start, stop = 0, len(keys)
    while stop - start > 1:
        middle = (start + stop) // 2
        if check(keys[start:middle]):
            start = middle
        else:
            stop = middle
    return start


def _lost_store_error() -> LostPeerError:
    """Return the error for a store that does not answer."""
    return LostPeerError(
        "the ranks' key-value store does not answer: its host (the launcher or rank 0) has ended or can't be reached; "
        "restart the run"
    )


def _check_signed(key: str, message: str | None) -> str:
    """Return the message at a key; raise MeshError if it is None, because no rank of this run has signed it."""
    if message is None:
        # An error, because if the rank waited on, anyone who can write to the store could stop the run silently.
        raise MeshError(
            f"{key} in the ranks' key-value store is not signed with this run's secret, so it is not from its "
            "ranks; find out who can connect to the store, then restart the run"
        )
    return message
