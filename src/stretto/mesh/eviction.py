"""Evictions: ranks ask the launcher to kill a process that hangs, so that another one can take its place.

A process that is stopped (SIGSTOP), or waits for a dead file server, does not end by itself. Those who meet for the
next round name its token, and say how long it may still take to come. If a process is only late, it withdraws the
request:

    ranks                       evict/TOKEN = 10
    launcher                    looks once a second; kills the process when the name has been there for 10 s
    the process, if it can      comes to meet the others, and sets evict/TOKEN to ""

It does not delete the key: the launcher looks for a key before it reads it, and would wait for one that has gone
meanwhile.
"""

import time
from collections.abc import Mapping

from stretto.mesh.rank_store import RankStore
from stretto.mesh.signed_store import SignedStore

KILL_SECONDS = 10.0
"""How long a process that others have waited for may still take to come, before its launcher kills it."""

_LOOK_SECONDS = 1.0


def evict(store: RankStore, token: str, seconds: float) -> None:
    """Ask the launcher to kill a process, unless it comes within `seconds`."""
    # The first one who asks decides how long, unless the process has come since.
    if not store.set_once(_key(token), str(seconds)) and store.get(_key(token)) == "":
        store.set(_key(token), str(seconds))


def withdraw_eviction(store: RankStore, token: str) -> None:
    """Tell the launcher that a process lives: it has come."""
    if store.get(_key(token)):
        store.set(_key(token), "")


class EvictionWatch:
    """The launcher's view: which of its processes it has to kill. `rounds_store` has the keys of the rounds."""

    def __init__(self, rounds_store: SignedStore) -> None:
        self._store = rounds_store
        self._first_seen: dict[str, float] = {}  # by token, since when it is named
        self._next_look = 0.0

    def find_overdue(self, tokens: Mapping[int, str]) -> list[int]:
        """Return the slots, of those in `tokens`, whose processes did not come in time; look once a second."""
        now = time.monotonic()
        if now < self._next_look:
            return []
        self._next_look = now + _LOOK_SECONDS
        limits = self.named(tokens)
        self._first_seen = {tokens[slot]: self._first_seen.get(tokens[slot], now) for slot in limits}
        return [slot for slot, limit in limits.items() if now - self._first_seen[tokens[slot]] >= limit]

    def named(self, tokens: Mapping[int, str]) -> dict[int, float]:
        """Return the slots whose processes are to be killed, each with the seconds that it may still take to come."""
        # A text that no rank has signed counts as none: otherwise anyone could have a process killed.
        texts = {slot: self._store.get(_key(token)) for slot, token in tokens.items()}
        return {slot: float(text) for slot, text in texts.items() if text}


def _key(token: str) -> str:
    return f"evict/{token}"
