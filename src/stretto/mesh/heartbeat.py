"""Pulse: each rank says now and then what it is doing, so that others know it of one that has stopped answering."""

import threading

from torch._C._distributed_c10d import Store

WAITING = "waiting"
"""How the status of a rank begins that only waits for others."""

# One sign in this time, and no more than this many signs a second from all ranks together.
_SECONDS = 1.0
_MAX_UPDATES_PER_SECOND = 200


class Heartbeat:
    """A thread that puts what `status` says into the store, as long as the process runs."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.status: object = "nothing yet"  # set by whoever works; read when a sign is due
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._rank = rank
        self._period = max(_SECONDS, size / _MAX_UPDATES_PER_SECOND)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._heartbeat, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join(_SECONDS)

    def _heartbeat(self) -> None:
        last = None
        try:
            while not self._stopped.wait(self._period):
                sign = str(self.status)
                if sign != last:
                    self._store.set(f"status/{self._rank}", sign)
                last = sign
        except RuntimeError:
            # The store is gone, at the end of the run or before it.
            return


def last_status(store: Store, rank: int) -> str | None:
    """Return what a rank said last; none if it has said nothing, or there is nobody to ask."""
    try:
        return store.get(f"status/{rank}").decode() if store.check([f"status/{rank}"]) else None
    except RuntimeError:
        return None
