"""Rendezvous: the ranks of one launch agree on a new launch id, and leave at the end, rank 0 last.

torchrun's store outlives the ranks: it may still hold keys of an earlier launch, and the agents of two nodes may count
restarts differently. So rank 0 draws a random id and echoes the random hello of each other rank, which then joins.

    rank 0                                  rank 1
    launch_id = 5f3a...                     hello/1 = 09bc...
    5f3a.../welcome/1 = 09bc...     ──►     reads launch_id, finds its own hello welcomed
    reads 5f3a.../joined/1          ◄──     5f3a.../joined/1 = 09bc...
"""

import uuid
from contextlib import suppress
from datetime import timedelta

from stretto.base.errors import LostPeerError
from stretto.mesh.c10d import Store
from stretto.mesh.timeouts import poll

# How long rank 0 waits for the other ranks to leave.
_LEAVE_SECONDS = 10.0


def rendezvous(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return the launch id that all ranks of this launch have agreed on."""
    seconds = timeout.total_seconds()
    return _lead(store, size, seconds) if rank == 0 else _follow(store, rank, seconds)


def leave(store: Store, rank: int, size: int) -> None:
    """Leave a store that rank 0 hosts, after a successful run: rank 0 waits until the others no longer need it."""
    if rank == 0:
        poll(lambda: store.add("left", 0) >= size - 1, _LEAVE_SECONDS)
        return
    # If this rank finishes after rank 0 has stopped waiting, the store is gone. That does no harm.
    with suppress(RuntimeError):
        store.add("left", 1)


def _lead(store: Store, size: int, seconds: float) -> str:
    launch_id = uuid.uuid4().hex
    store.set("launch_id", launch_id)
    missing = set(range(1, size))

    def welcome_ranks() -> bool:
        for rank in sorted(missing):
            if store.check([f"{launch_id}/joined/{rank}"]):
                missing.discard(rank)
            elif store.check([f"hello/{rank}"]):
                # A hello left over from an earlier launch does no harm: no rank joins until its new hello replaces it.
                store.set(f"{launch_id}/welcome/{rank}", store.get(f"hello/{rank}").decode())
        return not missing

    if not poll(welcome_ranks, seconds):
        raise _missing_rank_error(min(missing), seconds)
    return launch_id


def _follow(store: Store, rank: int, seconds: float) -> str:
    hello = uuid.uuid4().hex
    store.set(f"hello/{rank}", hello)
    launch_id = ""

    def is_welcome() -> bool:
        nonlocal launch_id
        launch_id = store.get("launch_id").decode() if store.check(["launch_id"]) else ""
        welcome_key = f"{launch_id}/welcome/{rank}"
        return store.check([welcome_key]) and store.get(welcome_key).decode() == hello

    if not poll(is_welcome, seconds):
        raise _missing_rank_error(0, seconds)
    store.set(f"{launch_id}/joined/{rank}", hello)
    return launch_id


def _missing_rank_error(rank: int, seconds: float) -> LostPeerError:
    return LostPeerError(f"rank {rank} did not join within {seconds:.0f} s; check its output, or raise the timeout")
