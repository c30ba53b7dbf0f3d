"""Rendezvous: the ranks of this start agree on a name that no other start has, and leave in order at the end.

torchrun's store outlives the ranks: it may still hold keys of an earlier start, and its agent's count of restarts may
differ from those of other machines. So rank 0 draws a new name, and accepts only ranks that know it.

    rank 0                                  rank 1
    leader = 5f3a...                        hello/1 = 09bc...
    5f3a.../welcome/1 = 09bc...     ──►     reads leader, finds its own hello welcomed
    reads 5f3a.../joined/1          ◄──     5f3a.../joined/1 = 09bc...
"""

import uuid
from contextlib import suppress
from datetime import timedelta

from stretto.base.errors import LostPeerError
from stretto.mesh.c10d import Store
from stretto.mesh.timeouts import poll

# How long rank 0 waits for ranks that still have something to do.
_LEAVE_SECONDS = 10.0


def rendezvous(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return a name that all ranks of this start have agreed on."""
    seconds = timeout.total_seconds()
    return _lead(store, size, seconds) if rank == 0 else _follow(store, rank, seconds)


def leave(store: Store, rank: int, size: int) -> None:
    """End a successful start: rank 0, which hosts the store, leaves last, so that no other rank finds it gone."""
    if rank == 0:
        poll(lambda: store.add("left", 0) >= size - 1, _LEAVE_SECONDS)
        return
    # A rank that is later than rank 0 waits finds the store gone.
    with suppress(RuntimeError):
        store.add("left", 1)


def _lead(store: Store, size: int, seconds: float) -> str:
    name = uuid.uuid4().hex
    store.set("leader", name)
    missing = set(range(1, size))

    def welcome_ranks() -> bool:
        for rank in sorted(missing):
            if store.check([f"{name}/joined/{rank}"]):
                missing.discard(rank)
            elif store.check([f"hello/{rank}"]):
                # This hello may be from an earlier start: then it won't join, and this start's rank says hello again.
                store.set(f"{name}/welcome/{rank}", store.get(f"hello/{rank}").decode())
        return not missing

    if not poll(welcome_ranks, seconds):
        raise _missing_rank_error(min(missing))
    return name


def _follow(store: Store, rank: int, seconds: float) -> str:
    hello = uuid.uuid4().hex
    store.set(f"hello/{rank}", hello)
    name = ""

    def is_welcome() -> bool:
        nonlocal name
        name = store.get("leader").decode() if store.check(["leader"]) else ""
        welcome = f"{name}/welcome/{rank}"
        return store.check([welcome]) and store.get(welcome).decode() == hello

    if not poll(is_welcome, seconds):
        raise _missing_rank_error(0)
    store.set(f"{name}/joined/{rank}", hello)
    return name


def _missing_rank_error(rank: int) -> LostPeerError:
    return LostPeerError(f"rank {rank} did not join in time; check that rank's output for the cause")
