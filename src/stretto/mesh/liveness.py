"""LivenessCheck: which rank is lost, and has a rank published an error?

A broken connection shows that some rank is lost, but not which one: its neighbors leave as well, and their neighbors
see only that. So a rank that notices pings the others through the store. Each rank answers from a thread, even while
its main thread waits in a collective. Without a failure this costs nothing.

    rank 0                    store                      rank 1 (thread)            rank 2 (killed)
    add ping/1, ping/2  ───►  pings/1 = 1, pings/2 = 1
                              ping/1/1, ping/2/1    ───► sees ping/1/1
    wait 3 s for both         alive/1/1             ◄─── answers
    alive/2/1 is missing ──►  lost = 2              ───► reads it when its own connections break
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count

from stretto.mesh.c10d import Store
from stretto.mesh.heartbeat import status_key
from stretto.mesh.rank_store import RankStore

_LOST_KEY = "lost"
_ERROR_KEY = "error"
_PRINTED_KEY = "printed"
# A rank that is alive answers within milliseconds, a little later on a busy machine.
_SECONDS = 3.0
_FOREVER = timedelta(days=365)


class LivenessCheck:
    """Pings other ranks and answers their pings; publishes and reads the error that ends a run."""

    def __init__(self, store: Store, rank: int, size: int, store_rank: int | None) -> None:
        self._store = RankStore(store, _SECONDS)
        self._rank = rank
        self._size = size
        # What the thread has read, in case the store is gone when it is needed.
        self._error: str | None = None
        self._lost: int | None = None
        self._store_rank = store_rank  # the rank that hosts the store; None if torchrun's agent does
        self._stopped = threading.Event()
        # A connection of its own, because the thread always waits on it.
        waiting_store: Store = store.clone()  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._answer_pings, args=(waiting_store,), daemon=True)
        self._thread.start()

    def find_lost_rank(self, ranks: Sequence[int]) -> int | None:
        """Ping `ranks`; return one that doesn't answer, or that another rank has found lost; None if there is none."""
        try:
            answer_keys = {rank: self._ping(rank) for rank in ranks if rank != self._rank}
            if not self._store.wait_for_keys(list(answer_keys.values()), _SECONDS):
                silent = [rank for rank, key in answer_keys.items() if self._store.get(key) is None]
                # For ranks that are not connected to the lost one: they see us leave. The first value stays.
                if silent:
                    self._store.set_once(_LOST_KEY, str(silent[0]))
            if self._store_rank == self._rank:
                # All that we pinged may be alive. Those next to the lost rank still need the store to find it.
                self._store.wait_for_keys([_LOST_KEY], 1.5 * _SECONDS)
                self._ping_all()
            lost = self._store.get(_LOST_KEY)
            return None if lost is None else int(lost)
        except RuntimeError:
            # The store is gone, so its host is lost; unless our thread had read of another rank before.
            return self._store_rank if self._lost is None else self._lost

    def publish_error(self, error: str) -> bool:
        """Publish the error that ends this rank; return False if another rank was first, whose error stays."""
        try:
            return self._store.set_once(_ERROR_KEY, f"{self._rank}\n{error}")
        except RuntimeError:
            # The store is gone: no rank is left to read it.
            return True

    def confirm_error(self, is_first: bool) -> None:
        """Tell the other ranks that the error was printed; ranks that were not first wait for that before they end."""
        try:
            if is_first:
                self._store.set(_PRINTED_KEY, "1")
            else:
                self._store.wait_for_keys([_PRINTED_KEY], _SECONDS)
            if self._store_rank == self._rank:
                self._ping_all()
        except RuntimeError:
            # The store is gone: there is nobody to wait for.
            return

    def read_error(self) -> str | None:
        """Return the published error; None if there is none, or the store is gone and none was read before."""
        try:
            error = self._store.get(_ERROR_KEY)
        except RuntimeError:
            return self._error
        return None if error is None else error.split("\n", 1)[1]

    def last_status(self, rank: int) -> str | None:
        """Return the last status that a rank has published; None if it has none or the store is gone."""
        try:
            return self._store.get(status_key(rank))
        except RuntimeError:
            return None

    def stop(self) -> None:
        """End the thread: if it still waited when Python exits, it would abort the process."""
        self._stopped.set()
        # If the store is gone the thread ends by itself.
        with suppress(RuntimeError):
            self._ping(self._rank)
        self._thread.join(0 if self._store.is_unreachable else _SECONDS)

    def _ping(self, rank: int) -> str:
        """Ping one rank; return the key at which it will answer."""
        number = self._store.add(f"pings/{rank}", 1)
        self._store.set(f"ping/{rank}/{number}", "1")
        return f"alive/{rank}/{number}"

    def _ping_all(self) -> None:
        """Make every rank read the lost rank and the error now: the store ends with us, and they may need it later."""
        lost = self._store.get(_LOST_KEY)
        answer_keys = [self._ping(rank) for rank in range(self._size) if rank != self._rank and str(rank) != lost]
        # Ranks that have already left won't answer; the others do so at once, unless the machine is busy.
        self._store.wait_for_keys(answer_keys, _SECONDS)

    def _answer_pings(self, store: Store) -> None:
        try:
            for number in count(1):
                store.wait([f"ping/{self._rank}/{number}"], _FOREVER)
                if self._stopped.is_set():
                    return
                lost = store.get(_LOST_KEY) if store.check([_LOST_KEY]) else None
                error = store.get(_ERROR_KEY) if store.check([_ERROR_KEY]) else None
                self._lost = None if lost is None else int(lost)
                self._error = None if error is None else error.decode().split("\n", 1)[1]
                store.set(f"alive/{self._rank}/{number}", "1")
        except RuntimeError:
            # The store is gone: the run has ended, or the store's host was lost.
            return
