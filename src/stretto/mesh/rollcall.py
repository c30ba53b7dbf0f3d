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

from stretto.mesh.pulse import last_sign
from stretto.mesh.within import Answer, TooLateError, within

_LOST = "lost"
_WORD = "word"
_SAID = "said"
# A living rank answers within milliseconds; a busy machine may take a little longer.
_SECONDS = 3.0
_FOR_EVER = timedelta(days=365)


class RollCall:
    """One rank's part in it: to answer, and to call."""

    def __init__(self, store: Store, rank: int, size: int, host: int | None) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._word: str | None = None  # what a rank has left, if we came to know it while the store was there
        self._lost: int | None = None  # whom a rank has found gone, likewise
        self._host = host  # the rank that keeps the store; none if it is torchrun's agent
        self._is_over = threading.Event()
        self._is_out_of_reach = False  # the store has not answered for too long
        # A connection of its own: one that waits can't be used for anything else.
        twin = store.clone()  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._answer, args=(twin,), daemon=True)
        self._thread.start()

    def find_lost(self, ranks: Sequence[int]) -> int | None:
        """Call `ranks` and return one that doesn't answer, or whom another has found; none if nobody can say."""
        return self._ask(lambda: self._find_lost(ranks), self._host, 4 * _SECONDS)

    def _find_lost(self, ranks: Sequence[int]) -> int | None:
        try:
            answers = {rank: self._call(rank) for rank in ranks if rank != self._rank}
            self._await(list(answers.values()), _SECONDS)
            absent = [rank for rank, answer in answers.items() if not self._store.check([answer])]
            if absent:
                # Word for ranks further off, to whom we will be the ones that went; the first word stands.
                self._store.compare_set(_LOST, "", str(absent[0]))
            if self._host == self._rank:
                # All that we called may live: then those near the lost one still find that out, and need the store.
                self._await([_LOST], 1.5 * _SECONDS)
                self._call_all()
            return self._read_lost(self._store)
        except RuntimeError:
            # The store is gone, and so is who kept it; maybe it had told us of another before.
            return self._host if self._lost is None else self._lost

    def leave_word(self, word: str) -> bool:
        """Leave word of why this rank ends, for all others; false if another was first, whose word stands."""
        own = f"{self._rank}\n{word}"
        try:
            return self._ask(lambda: self._store.compare_set(_WORD, "", own).decode() == own, otherwise=True)
        except RuntimeError:
            # The store is gone: there is nobody left to read it.
            return True

    def confirm_word(self, is_own: bool) -> None:
        """Say that the word left was printed; those who left none wait for that before they end."""
        try:
            self._ask(lambda: self._confirm(is_own), None, 4 * _SECONDS)
        except RuntimeError:
            return

    def _confirm(self, is_own: bool) -> None:
        if is_own:
            self._store.set(_SAID, "1")
        else:
            self._store.wait([_SAID], timedelta(seconds=_SECONDS))
        if self._host == self._rank:
            self._call_all()

    def find_word(self) -> str | None:
        """Return the word that a rank has left; none if there is no such word, or nobody to ask."""
        try:
            return self._ask(lambda: self._read_word(self._store), self._word)
        except RuntimeError:
            return self._word

    def last_sign(self, rank: int) -> str | None:
        """Return what a rank said last that it was doing."""
        return self._ask(lambda: last_sign(self._store, rank), None)

    def stop(self) -> None:
        """End the thread: one that still waits when Python ends would abort the process."""
        self._is_over.set()
        try:
            self._ask(lambda: self._call(self._rank), "")
        except RuntimeError:
            # The store is gone, which has ended the thread as well.
            return
        finally:
            self._thread.join(0 if self._is_out_of_reach else _SECONDS)

    def _ask(self, ask: Callable[[], Answer], otherwise: Answer, seconds: float = _SECONDS) -> Answer:
        """Ask the store, but not for ever: where a network is cut, nothing ever comes back."""
        if self._is_out_of_reach:
            return otherwise
        try:
            return within(seconds, ask)
        except TooLateError:
            self._is_out_of_reach = True
            return otherwise

    def _call(self, rank: int) -> str:
        """Call one rank; return the key under which it will answer."""
        number = self._store.add(f"calls/{rank}", 1)
        self._store.set(f"call/{rank}/{number}", "1")
        return f"alive/{rank}/{number}"

    def _call_all(self) -> None:
        """Let all ranks read what is in the store: it goes when we go, and only then will some of them ask."""
        lost = self._read_lost(self._store)
        answers = [self._call(rank) for rank in range(self._size) if rank not in (self._rank, lost)]
        # Those who have left already won't answer; the others do at once, unless the machine is busy.
        self._await(answers, _SECONDS)

    def _await(self, keys: list[str], seconds: float) -> None:
        """Wait until all of these are in the store, but no longer than that."""
        until = time.monotonic() + seconds
        while keys and time.monotonic() < until and not self._store.check(keys):
            time.sleep(0.05)

    def _read_lost(self, store: Store) -> int | None:
        return int(store.get(_LOST)) if store.check([_LOST]) else None

    def _read_word(self, store: Store) -> str | None:
        return store.get(_WORD).decode().split("\n", 1)[1] if store.check([_WORD]) else None

    def _answer(self, store: Store) -> None:
        try:
            for number in count(1):
                store.wait([f"call/{self._rank}/{number}"], _FOR_EVER)
                if self._is_over.is_set():
                    return
                self._word, self._lost = self._read_word(store), self._read_lost(store)
                store.set(f"alive/{self._rank}/{number}", "1")
        except RuntimeError:
            # The store is gone, at the end of the run or before it.
            return
