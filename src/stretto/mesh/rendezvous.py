"""Rendezvous: the ranks of one launch agree on a new launch id, and leave at the end, rank 0 last.

torchrun's store outlives the ranks: it may still hold keys of an earlier launch, and the agents of two nodes may count
restarts differently. So rank 0 draws a random id and welcomes the random hello of each other rank, which then joins.

    rank 0                                  rank 1
    launch_id = 5f3a...                     hello/1 = 09bc...
    5f3a.../welcome/1/09bc... = yes   ──►   reads launch_id, finds its own hello welcomed
    reads 5f3a.../joined/1            ◄──   5f3a.../joined/1 = yes

The last two are signed: each rank shows that it has the run's secret, by signing what the other has just drawn. Id and
hello are not, because an earlier launch may have left them with a signature of another secret.
"""

import uuid
from contextlib import suppress
from datetime import timedelta

from stretto.base.errors import LostPeerError, MeshError
from stretto.mesh.c10d import Store
from stretto.mesh.secret import SECRET_VARIABLE
from stretto.mesh.signed_store import SignedStore
from stretto.mesh.timeouts import poll

# How long rank 0 waits for the other ranks to leave.
_LEAVE_SECONDS = 10.0
_YES = "yes"


def rendezvous(store: SignedStore, rank: int, size: int, timeout: timedelta) -> str:
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


def _lead(store: SignedStore, size: int, seconds: float) -> str:
    launch_id = uuid.uuid4().hex
    store.unsigned.set("launch_id", launch_id)
    launch_store = store.in_scope(launch_id)
    missing = set(range(1, size))

    def welcome_ranks() -> bool:
        for rank in sorted(missing):
            if launch_store.check([f"joined/{rank}"]):
                if launch_store.get(f"joined/{rank}") != _YES:  # a rank without a secret reads the signature too
                    raise _secret_error(rank)
                missing.discard(rank)
            elif store.check([f"hello/{rank}"]):
                # A hello left over from an earlier launch does no harm: no rank joins until its new hello replaces it.
                hello = store.unsigned.get(f"hello/{rank}").decode(errors="replace")
                launch_store.set(f"welcome/{rank}/{hello}", _YES)
        return not missing

    if not poll(welcome_ranks, seconds):
        raise _missing_rank_error(min(missing), seconds)
    return launch_id


def _follow(store: SignedStore, rank: int, seconds: float) -> str:
    hello = uuid.uuid4().hex
    store.unsigned.set(f"hello/{rank}", hello)
    launch_id = ""

    def is_welcome() -> bool:
        nonlocal launch_id
        is_set = store.check(["launch_id"])
        launch_id = store.unsigned.get("launch_id").decode(errors="replace") if is_set else ""
        return store.check([f"{launch_id}/welcome/{rank}/{hello}"])

    if not poll(is_welcome, seconds):
        raise _missing_rank_error(0, seconds)
    launch_store = store.in_scope(launch_id)
    welcome = launch_store.get(f"welcome/{rank}/{hello}")
    # In any case, so that rank 0 fails with the same error if the secrets differ.
    launch_store.set(f"joined/{rank}", _YES)
    if welcome != _YES:
        raise _secret_error(rank)
    return launch_id


def _secret_error(rank: int) -> MeshError:
    return MeshError(
        f"rank 0 and rank {rank} have different secrets, or only one of them has a secret; set {SECRET_VARIABLE} to "
        "the same text on all nodes, or on none"
    )


def _missing_rank_error(rank: int, seconds: float) -> LostPeerError:
    return LostPeerError(f"rank {rank} did not join within {seconds:.0f} s; check its output, or raise the timeout")
