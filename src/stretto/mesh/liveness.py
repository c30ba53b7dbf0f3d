"""Roll call: which rank is gone, and did it say why?

A broken connection tells that some rank is gone, not which: those next to it leave too, and those next to them see just
that. So whoever notices calls the roll through the store, and every rank that lives answers from a thread of its own,
even while it waits in a collective. It costs nothing until it is needed.
"""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count

from torch._C._distributed_c10d import Store

from stretto.mesh.heartbeat import last_status
from stretto.mesh.timeouts import OperationTimeoutError, Result, call_with_timeout

_LOST_KEY = "lost"
_ERROR_KEY = "error"
_PRINTED_KEY = "printed"
# A living rank answers within milliseconds; a busy machine may take a little longer.
_SECONDS = 3.0
_FOREVER = timedelta(days=365)


class LivenessCheck:
    """One rank's part in it: to answer, and to call."""

    def __init__(self, store: Store, rank: int, size: int, store_rank: int | None) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._error: str | None = None  # what a rank has left, if we came to know it while the store was there
        self._lost: int | None = None  # whom a rank has found gone, likewise
        self._store_rank = store_rank  # the rank that keeps the store; none if it is torchrun's agent
        self._stopped = threading.Event()
        self._is_unreachable = False  # the store has not answered for too long
        # A connection of its own: one that waits can't be used for anything else.
        twin = store.clone()  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._answer_pings, args=(twin,), daemon=True)
        self._thread.start()

    def find_lost_rank(self, ranks: Sequence[int]) -> int | None:
        """Call `ranks` and return one that doesn't answer, or whom another has found; none if nobody can say."""
        return self._query(lambda: self._find_lost_rank(ranks), self._store_rank, 4 * _SECONDS)

    def _find_lost_rank(self, ranks: Sequence[int]) -> int | None:
        try:
            answers = {rank: self._ping(rank) for rank in ranks if rank != self._rank}
            self._wait_for_keys(list(answers.values()), _SECONDS)
            absent = [rank for rank, answer in answers.items() if not self._store.check([answer])]
            if absent:
                # Word for ranks further off, to whom we will be the ones that went; the first word stands.
                self._store.compare_set(_LOST_KEY, "", str(absent[0]))
            if self._store_rank == self._rank:
                # All that we called may live: then those near the lost one still find that out, and need the store.
                self._wait_for_keys([_LOST_KEY], 1.5 * _SECONDS)
                self._ping_all()
            return self._read_lost(self._store)
        except RuntimeError:
            # The store is gone, and so is who kept it; maybe it had told us of another before.
            return self._store_rank if self._lost is None else self._lost

    def publish_error(self, error: str) -> bool:
        """Leave word of why this rank ends, for all others; false if another was first, whose word stands."""
        own = f"{self._rank}\n{error}"
        try:
            return self._query(lambda: self._store.compare_set(_ERROR_KEY, "", own).decode() == own, default=True)
        except RuntimeError:
            # The store is gone: there is nobody left to read it.
            return True

    def confirm_error(self, is_own: bool) -> None:
        """Say that the word left was printed; those who left none wait for that before they end."""
        try:
            self._query(lambda: self._confirm(is_own), None, 4 * _SECONDS)
        except RuntimeError:
            return

    def _confirm(self, is_own: bool) -> None:
        if is_own:
            self._store.set(_PRINTED_KEY, "1")
        else:
            self._store.wait([_PRINTED_KEY], timedelta(seconds=_SECONDS))
        if self._store_rank == self._rank:
            self._ping_all()

    def read_error(self) -> str | None:
        """Return the word that a rank has left; none if there is no such word, or nobody to ask."""
        try:
            return self._query(lambda: self._read_error(self._store), self._error)
        except RuntimeError:
            return self._error

    def last_status(self, rank: int) -> str | None:
        """Return what a rank said last that it was doing."""
        return self._query(lambda: last_status(self._store, rank), None)

    def stop(self) -> None:
        """End the thread: one that still waits when Python ends would abort the process."""
        self._stopped.set()
        try:
            self._query(lambda: self._ping(self._rank), "")
        except RuntimeError:
            # The store is gone, which has ended the thread as well.
            return
        finally:
            self._thread.join(0 if self._is_unreachable else _SECONDS)

    def _query(self, call: Callable[[], Result], default: Result, seconds: float = _SECONDS) -> Result:
        """Ask the store, but not for ever: where a network is cut, nothing ever comes back."""
        if self._is_unreachable:
            return default
        try:
            return call_with_timeout(seconds, call)
        except OperationTimeoutError:
            self._is_unreachable = True
            return default

    def _ping(self, rank: int) -> str:
        """Call one rank; return the key under which it will answer."""
        number = self._store.add(f"pings/{rank}", 1)
        self._store.set(f"ping/{rank}/{number}", "1")
        return f"alive/{rank}/{number}"

    def _ping_all(self) -> None:
        """Let all ranks read what is in the store: it goes when we go, and only then will some of them ask."""
        lost = self._read_lost(self._store)
        answers = [self._ping(rank) for rank in range(self._size) if rank not in (self._rank, lost)]
        # Those who have left already won't answer; the others do at once, unless the machine is busy.
        self._wait_for_keys(answers, _SECONDS)

    def _wait_for_keys(self, keys: list[str], seconds: float) -> None:
        """Wait until all of these are in the store, but no longer than that."""
        until = time.monotonic() + seconds
        while keys and time.monotonic() < until and not self._store.check(keys):
            time.sleep(0.05)

    def _read_lost(self, store: Store) -> int | None:
        return int(store.get(_LOST_KEY)) if store.check([_LOST_KEY]) else None

    def _read_error(self, store: Store) -> str | None:
        return store.get(_ERROR_KEY).decode().split("\n", 1)[1] if store.check([_ERROR_KEY]) else None

    def _answer_pings(self, store: Store) -> None:
        try:
            for number in count(1):
                store.wait([f"ping/{self._rank}/{number}"], _FOREVER)
                if self._stopped.is_set():
                    return
                self._error, self._lost = self._read_error(store), self._read_lost(store)
                store.set(f"alive/{self._rank}/{number}", "1")
        except RuntimeError:
            # The store is gone, at the end of the run or before it.
            return
