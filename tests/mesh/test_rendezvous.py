"""Ranks of one start find each other in a store that remembers earlier ones."""

import threading
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from stretto.errors import LostPeerError
from stretto.mesh.rendezvous import leave, rendezvous

SOON = timedelta(seconds=10)


def gather(store: HashStore, ranks: list[int], size: int) -> dict[int, str]:
    found: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: found.update({rank: rendezvous(store, rank, size, SOON)}))
        for rank in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_agree_on_a_name_that_is_new_each_time() -> None:
    store = HashStore()
    names = [set(gather(store, order, 4).values()) for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1])]
    assert all(len(name) == 1 for name in names)
    assert len(set.union(*names)) == 3


def test_what_an_earlier_start_has_left_half_done_does_no_harm() -> None:
    store = HashStore()
    # A leader and a rank of starts that never came together.
    store.set("leader", "old")
    store.set("old/welcome/1", "someone")
    store.set("hello/2", "gone")
    assert len(set(gather(store, [1, 2, 0], 3).values())) == 1
    # Another number of ranks.
    assert len(set(gather(store, [1, 0], 2).values())) == 1


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(LostPeerError, match="rank 1 did not join in time"):
        rendezvous(HashStore(), 0, 2, timedelta(seconds=0.2))
    with pytest.raises(LostPeerError, match="rank 0 did not join in time"):
        rendezvous(HashStore(), 1, 2, timedelta(seconds=0.2))


def test_a_rank_that_parts_after_the_first_has_gone_ends_well() -> None:
    first = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    late = TCPStore("127.0.0.1", first.port, is_master=False, wait_for_workers=False)
    assert late.add("left", 0) == 0
    del first
    leave(late, 1, 2)
