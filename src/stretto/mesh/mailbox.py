"""Board: short notes from rank to rank that need no collective, so that they can pass while a step runs."""

import time
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Protocol

from torch._C._distributed_c10d import Store

from stretto.base.errors import LostPeerError
from stretto.mesh.timeouts import call_with_timeout

_POLL_SECONDS = 0.02
# A store answers in well under a millisecond; one that doesn't for so long can't be reached.
_SECONDS = 20.0


class Mailbox(Protocol):
    """Notes by key, seen by all ranks."""

    def post(self, key: str, message: str) -> None:
        """Put a message up; another with the same key is replaced."""
        ...

    def find(self, key: str) -> str | None:
        """Return a message, if it is up."""
        ...

    def remove(self, key: str) -> None:
        """Take a message down."""
        ...

    def next_number(self) -> int:
        """Return 0, 1, 2, ...: the same on all ranks that ask as often, to keep the keys of many users apart."""
        ...


class LocalMailbox:
    """The board of a rank that is alone."""

    def __init__(self) -> None:
        self._messages: dict[str, str] = {}
        self._numbers = count()

    def post(self, key: str, message: str) -> None:
        self._messages[key] = message

    def find(self, key: str) -> str | None:
        return self._messages.get(key)

    def remove(self, key: str) -> None:
        self._messages.pop(key, None)

    def next_number(self) -> int:
        return next(self._numbers)


class StoreMailbox:
    """A board in the store of the world, over a connection of its own; none of its calls waits for a message."""

    def __init__(self, store: Store) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._numbers = count()

    def post(self, key: str, message: str) -> None:
        call_with_timeout(_SECONDS, lambda: self._store.set(f"mailbox/{key}", message))

    def find(self, key: str) -> str | None:
        name = f"mailbox/{key}"
        return call_with_timeout(
            _SECONDS, lambda: self._store.get(name).decode() if self._store.check([name]) else None
        )

    def remove(self, key: str) -> None:
        call_with_timeout(_SECONDS, lambda: self._store.delete_key(f"mailbox/{key}"))

    def next_number(self) -> int:
        return next(self._numbers)


def wait_for_message(mailbox: Mailbox, key: str, source: int, timeout: timedelta, check: Callable[[], None]) -> str:
    """Wait for a message of another rank, but not for ever; `check` raises if waiting is of no use any more."""
    pause, until = _POLL_SECONDS, time.monotonic() + timeout.total_seconds()
    try:
        while (message := mailbox.find(key)) is None:
            check()
            if time.monotonic() > until:
                raise LostPeerError(
                    f"rank {source} said nothing for {timeout.total_seconds():.0f} s; look at that rank's own output, "
                    "or raise run.timeout"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
    except RuntimeError as error:
        raise LostPeerError(
            "the ranks' store is gone, and with it who kept it: the launcher, or rank 0; start it again"
        ) from error
    return message
