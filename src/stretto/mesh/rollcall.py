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

_LOST = "lost"
# A living rank answers within milliseconds; a busy machine may take a little longer.
_SECONDS = 3.0
_FOR_EVER = timedelta(days=365)


class RollCall:
    """One rank's part in it: to answer, and to call."""

    def __init__(self, store: Store, rank: int, host: int | None) -> None:
        self._store = store
        self._rank = rank
        self._host = host  # the rank that keeps the store; none if it is torchrun's agent
        self._is_over = threading.Event()
        # A connection of its own: one that waits can't be used for anything else.
        twin = store.clone()  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._answer, args=(twin,), daemon=True)
        self._thread.start()

    def find_lost(self, ranks: Sequence[int]) -> int | None:
        """Call `ranks` and return one that doesn't answer, or whom another has found; none if nobody can say."""
        try:
            answers = {rank: self._call(rank) for rank in ranks if rank != self._rank}
            until = time.monotonic() + _SECONDS
            while answers and time.monotonic() < until and not self._store.check(list(answers.values())):
                time.sleep(0.05)
            absent = [rank for rank, answer in answers.items() if not self._store.check([answer])]
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

    def stop(self) -> None:
        """End the thread: one that still waits when Python ends would abort the process."""
        self._is_over.set()
        try:
            self._call(self._rank)
        except RuntimeError:
            # The store is gone, which has ended the thread as well.
            return
        finally:
            self._thread.join(_SECONDS)

    def _call(self, rank: int) -> str:
        """Call one rank; return the key under which it will answer."""
        number = self._store.add(f"calls/{rank}", 1)
        self._store.set(f"call/{rank}/{number}", "1")
        return f"alive/{rank}/{number}"

    def _answer(self, store: Store) -> None:
        try:
            for number in count(1):
                store.wait([f"call/{self._rank}/{number}"], _FOR_EVER)
                if self._is_over.is_set():
                    return
                store.set(f"alive/{self._rank}/{number}", "1")
        except RuntimeError:
            # The store is gone, at the end of the run or before it.
            return
