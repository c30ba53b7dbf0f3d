"""Evictions: a process that others have waited for is killed, unless it comes meanwhile."""

import time
from datetime import timedelta

from stretto.mesh.c10d import HashStore, TCPStore
from stretto.mesh.eviction import EvictionWatch, evict, withdraw_eviction
from stretto.mesh.rank_store import RankStore
from stretto.mesh.signed_store import SignedStore


def overdue_within(seconds: float, watch: EvictionWatch) -> list[int]:
    """The slots that are overdue at some moment within so many seconds; slot 3 has process `a`, slot 4 `b`."""
    end = time.monotonic() + seconds
    while not (slots := watch.find_overdue({3: "a", 4: "b"})) and time.monotonic() < end:
        time.sleep(0.02)
    return slots


def test_a_process_is_overdue_after_its_seconds() -> None:
    store = SignedStore(HashStore(), b"secret")
    watch = EvictionWatch(store)
    assert overdue_within(0, watch) == []
    evict(RankStore(store), "b", 0.5)
    started = time.monotonic()
    assert overdue_within(10, watch) == [4]
    assert time.monotonic() - started >= 0.5


def test_a_process_that_has_come_is_not_overdue() -> None:
    store = SignedStore(HashStore(), b"secret")
    watch = EvictionWatch(store)
    evict(RankStore(store), "b", 1.5)
    assert overdue_within(1.2, watch) == []
    withdraw_eviction(RankStore(store), "b")
    assert overdue_within(1.5, watch) == []


def test_the_first_limit_counts() -> None:
    """Members of a round may say differently how long they wait."""
    store = SignedStore(HashStore(), b"secret")
    evict(RankStore(store), "b", 5)
    evict(RankStore(store), "b", 600)
    assert EvictionWatch(store).named({4: "b"}) == {4: 5.0}


def test_a_process_can_be_named_again() -> None:
    store = RankStore(SignedStore(HashStore(), b"secret"))
    evict(store, "b", 5)
    withdraw_eviction(store, "b")
    evict(store, "b", 7)
    assert EvictionWatch(SignedStore(store._store.unsigned, b"secret")).named({4: "b"}) == {4: 7.0}


class WithdrawnStore(SignedStore):
    """A store in which a process withdraws its name just after the launcher has found it."""

    def get(self, key: str) -> str | None:
        is_there = self.check([key])
        withdraw_eviction(RankStore(SignedStore(self.unsigned, b"secret")), "b")
        return self.verify(key, self.unsigned.get(key)) if is_there else None


def test_the_launcher_does_not_wait_for_a_name_that_is_withdrawn() -> None:
    """A store waits for a key that does not exist any more."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=2))
    evict(RankStore(SignedStore(server, b"secret")), "b", 0)
    assert EvictionWatch(WithdrawnStore(server, b"secret")).find_overdue({4: "b"}) == []


def test_only_ranks_of_the_run_can_have_a_process_killed() -> None:
    store = SignedStore(HashStore(), b"secret")
    store.unsigned.set("evict/b", "0")
    assert overdue_within(1.2, EvictionWatch(store)) == []
