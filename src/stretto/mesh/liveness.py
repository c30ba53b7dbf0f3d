"""LivenessCheck: finds out which rank is lost, and publishes the error that ends a run.

A broken connection shows that some rank is lost, but not which one: the neighbors of the lost rank end as well, which
breaks their own connections. So a rank whose connection breaks pings its peers through the key-value store. Each rank
answers from a thread, even while its main thread waits in a collective. While nothing fails, no rank pings another.

    rank 0                    store                      rank 1 (thread)            rank 2 (killed)
    counts and pings    ───►  num_pings/1 = 1, num_pings/2 = 1
                              ping/1/1, ping/2/1    ───► sees ping/1/1
    waits 3 s for both        alive/1/1             ◄─── answers
    alive/2/1 is missing ──►  lost = 2              ───► reads it when its own connections break
"""

import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count

from stretto.mesh.rank_store import RankStore
from stretto.mesh.signed_store import SignedStore
from stretto.mesh.status import status_key
from stretto.mesh.timeouts import OperationTimeoutError

_LOST_RANK_KEY = "lost"
_ERROR_KEY = "error"
_PRINTED_KEY = "printed"
# How long to wait for the store or for a rank. A live rank answers within milliseconds, or a bit later on a busy node.
_ANSWER_TIMEOUT_SECONDS = 3.0
_FOREVER = timedelta(days=365)


class LivenessCheck:
    """Pings other ranks and answers their pings; publishes and reads the error that ends a run.

    Every call survives the loss of the store: below, RuntimeError means that it is gone or does not answer.
    """

    def __init__(self, store: SignedStore, rank: int, size: int, store_rank: int | None) -> None:
        self._store = RankStore(store, _ANSWER_TIMEOUT_SECONDS)
        self._rank = rank
        self._size = size
        # The thread copies these two from the store at every ping: the store may be gone when this rank needs them.
        self._cached_error: str | None = None
        self._cached_lost_rank: int | None = None
        self._store_rank = store_rank  # the rank that hosts the store; None if an elastic agent does
        self._stopped = threading.Event()
        # The thread has its own connection, since its wait blocks all other calls on the same connection.
        self._thread = threading.Thread(target=self._answer_pings, args=(store.clone(),), daemon=True)
        self._thread.start()

    def find_lost_rank(self, ranks: Sequence[int]) -> int | None:
        """Ping `ranks` and report a silent one; return the rank that was first reported lost (maybe us), or None."""
        try:
            answer_keys = {rank: self._ping(rank) for rank in ranks if rank != self._rank}
            if not self._store.wait_for_keys(list(answer_keys.values()), _ANSWER_TIMEOUT_SECONDS):
                silent = [rank for rank, key in answer_keys.items() if self._store.get(key) is None]
                # Ranks without a connection to the lost rank see only that we end. This key tells them its number.
                if silent:
                    self._store.set_once(_LOST_RANK_KEY, str(silent[0]))
            if self._store_rank == self._rank:
                # If the lost rank is not among `ranks`, its neighbors report it after their own timeout, to our store.
                self._store.wait_for_keys([_LOST_RANK_KEY], 1.5 * _ANSWER_TIMEOUT_SECONDS)
                self._ping_all()
            return _parse_rank(self._store.get(_LOST_RANK_KEY))
        except RuntimeError:
            # The rank that hosts the store is lost, or it ended because another was lost, which our thread has cached.
            return self._store_rank if self._cached_lost_rank is None else self._cached_lost_rank

    def report_lost(self, rank: int) -> None:
        """Publish that a rank is lost, unless another rank was reported before."""
        with suppress(RuntimeError):
            self._store.set_once(_LOST_RANK_KEY, str(rank))

    def lost_rank(self) -> int | None:
        """Return the rank that was first reported lost; None if there is none. Pings nobody."""
        try:
            return _parse_rank(self._store.get(_LOST_RANK_KEY))
        except OperationTimeoutError:
            return self._cached_lost_rank  # the store, or this process, may only be slow
        except RuntimeError:
            return self._store_rank if self._cached_lost_rank is None else self._cached_lost_rank

    def retry_store(self) -> None:
        """Call the store again, although it may not have answered an earlier call in time."""
        self._store.is_unreachable = False

    def share_before_exit(self) -> None:
        """If this rank hosts the store, make every other rank cache the lost rank and the error: the store ends too."""
        if self._store_rank == self._rank:
            with suppress(RuntimeError):
                self._ping_all()

    def publish_error(self, error: str, print_error: Callable[[], None]) -> None:
        """Publish the error that ends this rank and call `print_error`, unless another rank has published one before.

        The other ranks wait until it is printed, because a launcher ends all ranks as soon as one has ended.
        """
        is_first = True
        with suppress(RuntimeError):
            # The value starts with the rank number: if two ranks publish the same error, only one of them is first.
            is_first = self._store.set_once(_ERROR_KEY, f"{self._rank}\n{error}")
        if is_first:
            print_error()
        with suppress(RuntimeError):
            if is_first:
                self._store.set(_PRINTED_KEY, "1")
            else:
                self._store.wait_for_keys([_PRINTED_KEY], _ANSWER_TIMEOUT_SECONDS)
        self.share_before_exit()

    def read_error(self) -> str | None:
        """Return the published error (without its first line, the rank), or the cached one if the store is gone."""
        try:
            error = self._store.get(_ERROR_KEY)
        except RuntimeError:
            return self._cached_error
        return None if error is None else error.partition("\n")[2]

    def last_status(self, rank: int) -> str | None:
        """Return the last status that a rank has published; None if there is none or the store is gone."""
        try:
            return self._store.get(status_key(rank))
        except RuntimeError:
            return None

    def stop(self) -> None:
        """End the thread. If it were still waiting when Python exits, it would abort the process."""
        self._stopped.set()
        # A ping wakes the thread. If the store is gone, the thread has ended by itself.
        with suppress(RuntimeError):
            self._ping(self._rank)
        self._thread.join(0 if self._store.is_unreachable else _ANSWER_TIMEOUT_SECONDS)

    def _ping(self, rank: int) -> str:
        """Ping one rank; return the key at which it will answer."""
        number = self._store.add(f"num_pings/{rank}", 1)
        self._store.set(f"ping/{rank}/{number}", "1")
        return f"alive/{rank}/{number}"

    def _ping_all(self) -> None:
        """Ping every rank that is not lost, so that it caches the lost rank and the error, and wait for the answers."""
        lost = self._store.get(_LOST_RANK_KEY)
        answer_keys = [self._ping(rank) for rank in range(self._size) if rank != self._rank and str(rank) != lost]
        # Ranks that have already ended won't answer, so this may time out.
        self._store.wait_for_keys(answer_keys, _ANSWER_TIMEOUT_SECONDS)

    def _answer_pings(self, store: SignedStore) -> None:
        try:
            for number in count(1):
                store.wait([f"ping/{self._rank}/{number}"], _FOREVER)
                if self._stopped.is_set():
                    return
                error = store.get(_ERROR_KEY)
                self._cached_lost_rank = _parse_rank(store.get(_LOST_RANK_KEY))
                self._cached_error = None if error is None else error.partition("\n")[2]
                store.set(f"alive/{self._rank}/{number}", "1")
        except RuntimeError:
            # The store is gone: the run has ended, or the process that hosts the store was lost.
            return


def _parse_rank(text: str | None) -> int | None:
    """Return the rank in a text; None if there is none. Without a secret, anyone may have written the text."""
    return int(text) if text is not None and re.fullmatch("[0-9]{1,9}", text) else None
