"""StatusPublisher: each rank publishes what it is doing, so that others can say what a lost rank did last."""

import threading
import time

from stretto.mesh.rank_store import RankStore
from stretto.mesh.signed_store import SignedStore

WAITING = "waiting"
"""The first word of the status of a rank that is waiting for others."""

# Each rank writes at most once per period. With many ranks the period grows, to spare the store.
_PERIOD_SECONDS = 1.0
_MAX_UPDATES_PER_SECOND = 200


class StatusPublisher:
    """Runs a thread that looks at `status` once per period and writes it to the store if it has changed."""

    def __init__(self, store: SignedStore, rank: int, size: int) -> None:
        self.status: object = "starting"  # set by the main thread; our thread reads it and converts it to text
        self.status_since = time.monotonic()  # when it was set
        self._store = RankStore(store)
        self._rank = rank
        self._period = max(_PERIOD_SECONDS, size / _MAX_UPDATES_PER_SECOND)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._publish, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join(_PERIOD_SECONDS)

    def _publish(self) -> None:
        published = None
        try:
            while not self._stopped.wait(self._period):
                status = str(self.status)
                if status != published:
                    self._store.set(status_key(self._rank), status)
                published = status
        except RuntimeError:
            # The store is gone: the run has ended, or the process that hosts the store was lost.
            return


def status_key(rank: int) -> str:
    """Return the key of a rank's status."""
    return f"status/{rank}"
