"""Ranks of one launch find each other in a store that still holds keys of earlier launches."""

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest

from stretto.errors import LostPeerError
from stretto.mesh import timeouts
from stretto.mesh.c10d import HashStore, TCPStore
from stretto.mesh.rendezvous import delete_keys, leave, rendezvous
from stretto.mesh.signed_store import SignedStore

SOON = timedelta(seconds=10)


def gather(store: HashStore, ranks: list[int], size: int, secret: bytes | None = None) -> dict[int, str]:
    names: dict[int, str] = {}
    signed = SignedStore(store, secret)
    threads = [
        threading.Thread(target=lambda rank=rank: names.update({rank: rendezvous(signed, rank, size, SOON)}))
        for rank in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return names


def test_all_ranks_agree_on_a_name_that_is_new_each_time() -> None:
    store = HashStore()
    names = [set(gather(store, order, 4).values()) for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1])]
    assert all(len(name) == 1 for name in names)
    assert len(set.union(*names)) == 3


def test_keys_of_an_earlier_incomplete_launch_do_no_harm() -> None:
    store = HashStore()
    # Left by a rank 0 and a rank 2 whose launches never completed.
    store.set("launch_id", "old")
    store.set("old/welcome/1/someone", "yes")
    store.set("hello/2", "gone")
    assert len(set(gather(store, [1, 2, 0], 3).values())) == 1
    # A different secret.
    assert len(set(gather(store, [1, 2, 0], 3, b"first").values())) == 1
    assert len(set(gather(store, [2, 1, 0], 3, b"second").values())) == 1
    # A different number of ranks.
    assert len(set(gather(store, [1, 0], 2).values())) == 1


def test_a_rank_deletes_its_own_keys_and_not_those_of_a_newer_launch() -> None:
    store = HashStore()
    names = gather(store, [0, 1, 2], 3)
    store.set("hello/2", "of a newer launch")
    for rank, name in names.items():
        delete_keys(SignedStore(store), rank, name)
    assert not store.check(["hello/1"]) and store.get("hello/2") == b"of a newer launch"
    assert not store.check([f"{names[0]}/joined/1"]) and not store.check([f"{names[0]}/joined/2"])


def test_a_rank_that_does_not_join_is_named() -> None:
    with pytest.raises(LostPeerError, match="rank 1 did not join within"):
        rendezvous(SignedStore(HashStore()), 0, 2, timedelta(seconds=0.2))
    with pytest.raises(LostPeerError, match="rank 0 did not join within"):
        rendezvous(SignedStore(HashStore()), 1, 2, timedelta(seconds=0.2))


def test_a_rank_that_leaves_after_rank_0_ends_without_an_error() -> None:
    first = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    late = TCPStore("127.0.0.1", first.port, is_master=False, wait_for_workers=False)
    assert late.add("left", 0) == 0
    del first
    leave(late, 1, 2)


def test_ranks_do_not_poll_a_store_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append)
    monkeypatch.setattr(timeouts, "time", clock)
    assert not timeouts.poll(lambda: False, 10.0)
    assert 10.0 <= sum(pauses) <= 10.0 + 1.5 * 0.05
    assert all(pause <= 1.5 * 0.05 for pause in pauses) and len(set(pauses)) > 0.9 * len(pauses)
