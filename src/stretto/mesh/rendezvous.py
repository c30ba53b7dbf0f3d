"""Rendezvous: the ranks of one launch agree on a new launch id, and leave at the end, rank 0 last.

torchrun's store outlives the ranks: it may still hold keys of an earlier launch, and the agents of two nodes may count
restarts differently. So rank 0 draws a random id and welcomes the random hello of each other rank, which then joins.

    rank 0                                  rank 1
    reads all hellos                  ◄──   hello/1 = 09bc...
    welcome/1/09bc... = 5f3a...       ──►   waits for this key: 5f3a... is the launch id
    reads 5f3a.../joined/1            ◄──   5f3a.../joined/1 = yes

The last two are signed: each rank shows that it has the run's secret, by signing what the other has just drawn. A hello
is not, because an earlier launch may have left it with a signature of another secret. Rank 0 reads and writes the keys
of all ranks in one call, and the others wait, so each rank makes a few calls, however many ranks there are.
"""

import uuid
from contextlib import suppress
from datetime import timedelta

from stretto.base.errors import LostPeerError, MeshError
from stretto.mesh.c10d import Store
from stretto.mesh.rank_store import RankStore, first_missing
from stretto.mesh.secret import SECRET_VARIABLE
from stretto.mesh.signed_store import SignedStore
from stretto.mesh.timeouts import poll

# How long rank 0 waits for the other ranks to leave.
_LEAVE_SECONDS = 10.0
_YES = "yes"
_ID_LENGTH = 32


def rendezvous(store: SignedStore, rank: int, size: int, timeout: timedelta) -> str:
    """Return the launch id that all ranks of this launch have agreed on."""
    seconds = timeout.total_seconds()
    return _lead(store, size, seconds) if rank == 0 else _follow(store, rank, size, seconds)


def delete_keys(store: SignedStore, rank: int, launch_id: str) -> None:
    """Delete this rank's keys of the rendezvous, after all ranks have joined."""
    if rank == 0:
        return
    store.delete(f"{launch_id}/joined/{rank}")
    hello_key = f"hello/{rank}"
    if store.check([hello_key]):
        welcome_key = f"welcome/{rank}/{store.unsigned.get(hello_key).decode(errors='replace')}"
        if store.get(welcome_key) == launch_id:  # otherwise the hello is that of a newer launch
            store.delete(hello_key)
            store.delete(welcome_key)


def leave(store: Store, rank: int, size: int) -> None:
    """Leave a store that rank 0 hosts, after a successful run: rank 0 waits until the others no longer need it."""
    # If this rank finishes after rank 0 has stopped waiting, the store is gone. That does no harm.
    with suppress(RuntimeError):
        if rank == 0:
            store.wait(["all_left"], timedelta(seconds=_LEAVE_SECONDS))
        elif store.add("left", 1) == size - 1:
            store.set("all_left", _YES)


def _lead(store: SignedStore, size: int, seconds: float) -> str:
    launch_id = uuid.uuid4().hex
    store.unsigned.set("launch_id", launch_id)
    launch_store = store.in_scope(launch_id)
    hello_keys = [f"hello/{rank}" for rank in range(1, size)]
    joined_keys = [f"joined/{rank}" for rank in range(1, size)]
    welcomed: set[str] = set()

    def welcome_ranks() -> bool:
        if not store.check(hello_keys):
            return False
        # A hello left over from an earlier launch does no harm: no rank joins until its new hello replaces it.
        hellos = [value.decode(errors="replace") for value in store.unsigned.multi_get(hello_keys)]
        welcomes = {f"welcome/{rank}/{hello}": launch_id for rank, hello in enumerate(hellos, start=1)}
        if new := {key: text for key, text in welcomes.items() if key not in welcomed}:
            store.set_all(new)
            welcomed.update(new)
        return launch_store.check(joined_keys)

    if not poll(welcome_ranks, seconds, max_pause=0.5):
        missing = hello_keys if not store.check(hello_keys) else [f"{launch_id}/{key}" for key in joined_keys]
        raise _missing_rank_error(1 + first_missing(store.check, missing), seconds)
    for rank, text in enumerate(launch_store.get_all(joined_keys), start=1):
        if text != _YES:  # a rank without a secret reads the signature too
            raise _secret_error(rank)
    return launch_id


def _follow(store: SignedStore, rank: int, size: int, seconds: float) -> str:
    hello = uuid.uuid4().hex
    store.unsigned.set(f"hello/{rank}", hello)
    key = f"welcome/{rank}/{hello}"
    if not RankStore(store).wait_for_keys([key], seconds):
        # Rank 0 welcomes nobody before all are there.
        hello_keys = [f"hello/{other}" for other in range(1, size)]
        is_rank_0_missing = store.check(hello_keys)
        raise _missing_rank_error(0 if is_rank_0_missing else 1 + first_missing(store.check, hello_keys), seconds)
    welcome = store.unsigned.get(key)
    launch_id = welcome.decode(errors="replace")[-_ID_LENGTH:]
    # In any case, so that rank 0 fails with the same error if the secrets differ.
    store.in_scope(launch_id).set(f"joined/{rank}", _YES)
    if store.verify(key, welcome) != launch_id:
        raise _secret_error(rank)
    return launch_id


def _secret_error(rank: int) -> MeshError:
    return MeshError(
        f"rank 0 and rank {rank} have different secrets, or only one of them has a secret; set {SECRET_VARIABLE} to "
        "the same text on all nodes, or on none"
    )


def _missing_rank_error(rank: int, seconds: float) -> LostPeerError:
    return LostPeerError(f"rank {rank} did not join within {seconds:.0f} s; check its output, or raise the timeout")
