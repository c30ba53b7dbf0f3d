"""Gathering: the ranks of this start agree on a name for it that no other start has, and part in order.

An agent's store outlives the ranks: it may still hold what ranks of an earlier start have left in it, and the agent's
count of restarts is its own, not that of the other machines. So the first rank draws a name, and takes in only those
who answer to it.
"""

import time
import uuid
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import Store

from stretto.base.errors import LostPeerError

_POLL_SECONDS = 0.01
# A rank that still has something to do is not waited for any longer than so many seconds.
_LEAVE_SECONDS = 10.0


def rendezvous(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return a name that all ranks of this start have agreed on; each names itself first, so none is an old one's."""
    until = time.monotonic() + timeout.total_seconds()
    return _rendezvous_as_leader(store, size, until) if rank == 0 else _rendezvous_as_follower(store, rank, until)


def leave(store: Store, rank: int, size: int) -> None:
    """End a start that went well: the first rank, which keeps the store, goes last, so that no other finds it gone."""
    if rank != 0:
        # Who comes later than the first waits finds it gone, and nobody left to tell.
        with suppress(RuntimeError):
            store.add("left", 1)
        return
    until = time.monotonic() + _LEAVE_SECONDS
    while store.add("left", 0) < size - 1 and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)


def _rendezvous_as_leader(store: Store, size: int, until: float) -> str:
    name = uuid.uuid4().hex
    store.set("leader", name)
    missing = set(range(1, size))
    while missing:
        for rank in sorted(missing):
            if store.check([f"{name}/joined/{rank}"]):
                missing.discard(rank)
            elif store.check([f"hello/{rank}"]):
                # Maybe one of an earlier start: then it won't join, and the one of this start will say hello again.
                store.set(f"{name}/welcome/{rank}", store.get(f"hello/{rank}").decode())
        _poll(until, sorted(missing))
    return name


def _rendezvous_as_follower(store: Store, rank: int, until: float) -> str:
    own = uuid.uuid4().hex
    store.set(f"hello/{rank}", own)
    while True:
        if store.check(["leader"]):
            name = store.get("leader").decode()
            welcome = f"{name}/welcome/{rank}"
            if store.check([welcome]) and store.get(welcome).decode() == own:
                store.set(f"{name}/joined/{rank}", own)
                return name
        _poll(until, [0])


def _poll(until: float, missing: list[int]) -> None:
    if missing and time.monotonic() > until:
        raise LostPeerError(f"rank {missing[0]} did not join in time; check that rank's output for the cause")
    time.sleep(_POLL_SECONDS if missing else 0)
