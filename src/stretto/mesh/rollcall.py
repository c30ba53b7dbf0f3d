"""Roll call: which rank is gone?

A broken connection tells that some rank is gone, not which: those next to it leave too, and those next to them see just
that. So whoever notices calls the roll through the store, and every rank that lives answers from a thread of its own,
even while it waits in a collective. It costs nothing until it is needed.
"""

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import count

from torch._C._distributed_c10d import Store

_CALL, _LOST = "roll-call", "lost"
# A living rank answers within milliseconds; a busy machine may take a little longer.
_SECONDS = 3.0
_FOR_EVER = timedelta(days=365)


class RollCall:
    """One rank's part in it: to answer, and to call."""

    def __init__(self, store: Store, rank: int, host: int | None) -> None:
        self._store = store
        self._rank = rank
        self._host = host  # the rank that keeps the store; none if it is torchrun's agent
        # A connection of its own: one that waits can't be used for anything else.
        twin = store.clone()  # type: ignore[attr-defined]
        threading.Thread(target=self._answer, args=(twin,), daemon=True).start()

    def find_lost(self, ranks: Sequence[int]) -> int | None:
        """Call `ranks` and return one that doesn't answer, or whom another has found; none if nobody can say."""
        absent = [rank for rank in ranks if rank != self._rank]
        try:
            call = self._store.add("calls", 1)
            self._store.set(f"{_CALL}/{call}", "1")
            until = time.monotonic() + _SECONDS
            keys = {rank: f"alive/{call}/{rank}" for rank in absent}
            while time.monotonic() < until and not self._store.check([*keys.values(), f"{_CALL}/{call}"]):
                time.sleep(0.05)
            absent = [rank for rank, key in keys.items() if not self._store.check([key])]
            if absent:
                # Word for ranks further off, to whom we will be the ones that went; the first word stands.
                self._store.compare_set(_LOST, "", str(absent[0]))
            if self._host == self._rank:
                # The store goes when we go; others may still be asking.
                time.sleep(_SECONDS)
            return int(self._store.get(_LOST)) if self._store.check([_LOST]) else None
        except RuntimeError:
            # The store is gone, and so is who kept it.
            return self._host

    def _answer(self, store: Store) -> None:
        try:
            for call in count(1):
                store.wait([f"{_CALL}/{call}"], _FOR_EVER)
                store.set(f"alive/{call}/{self._rank}", "1")
        except RuntimeError:
            # The store is gone, at the end of the run or before it.
            return
