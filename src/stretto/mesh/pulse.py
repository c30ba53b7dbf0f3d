"""Pulse: each rank says now and then what it is doing, so that others know it of one that has stopped answering."""

import threading

from torch._C._distributed_c10d import Store

# One sign in this time, and no more than this many signs a second from all ranks together.
_SECONDS = 1.0
_SIGNS_PER_SECOND = 200


class Pulse:
    """A thread that puts what `doing` says into the store, as long as the process runs."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.doing: object = "nothing yet"  # set by whoever works; read when a sign is due
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._rank = rank
        self._period = max(_SECONDS, size / _SIGNS_PER_SECOND)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._is_over.set()
        self._thread.join(_SECONDS)

    def _beat(self) -> None:
        last = None
        try:
            while not self._is_over.wait(self._period):
                sign = str(self.doing)
                if sign != last:
                    self._store.set(f"sign/{self._rank}", sign)
                last = sign
        except RuntimeError:
            # The store is gone, at the end of the run or before it.
            return


def last_sign(store: Store, rank: int) -> str | None:
    """Return what a rank said last; none if it has said nothing, or there is nobody to ask."""
    try:
        return store.get(f"sign/{rank}").decode() if store.check([f"sign/{rank}"]) else None
    except RuntimeError:
        return None
