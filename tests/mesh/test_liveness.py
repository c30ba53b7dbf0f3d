"""Failures reach all ranks through the tree, and name the right rank; what is not from a rank is ignored."""

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.mesh import liveness as liveness_module
from stretto.mesh.c10d import HashStore
from stretto.mesh.launch_info import LaunchInfo
from stretto.mesh.liveness import WAITING, Failure, Liveness
from stretto.mesh.rank_store import first_missing
from stretto.mesh.signed_store import SignedStore

SECRET = b"0123456789abcdef"
SOON = 10.0


@contextmanager
def launch(
    size: int, timeout: float = 60.0, secret: bytes | None = SECRET
) -> Iterator[tuple[HashStore, list[Liveness]]]:
    """Connect all ranks, each as in a process of its own."""
    store = HashStore()

    def join(rank: int) -> Liveness:
        info = LaunchInfo(rank, size, rank, size, "127.0.0.1", 0)
        return Liveness(SignedStore(store, secret).in_scope("launch"), info, timedelta(seconds=timeout))

    with ThreadPoolExecutor(size) as pool:
        ranks = list(pool.map(join, range(size)))
    try:
        yield store, ranks
    finally:
        for rank in ranks:
            rank.stop(says_goodbye=True)


def failures(ranks: list[Liveness], without: set[int]) -> list[Failure | None]:
    until = time.monotonic() + SOON
    for number, rank in enumerate(ranks):
        if number not in without:
            rank._has_failed.wait(max(0.0, until - time.monotonic()))
    return [rank.failure for number, rank in enumerate(ranks) if number not in without]


@pytest.mark.parametrize("victim", [0, 1, 7, 24])
def test_all_ranks_name_a_lost_rank_and_what_it_did_last(victim: int) -> None:
    with launch(25) as (_, ranks):
        ranks[victim].set_status("in F0.1 of window 9")
        time.sleep(1.2)  # until it has sent a heartbeat
        ranks[victim].stop(says_goodbye=False)  # as when its process ends: the connections close
        assert set(failures(ranks, {victim})) == {Failure("lost", victim, "in F0.1 of window 9")}


def test_when_all_ranks_of_a_node_are_lost_every_other_rank_names_one_of_them() -> None:
    # Rank 1 is the parent of ranks 9 to 16: they are cut off from the others, and from each other.
    lost = {1, 2, 9, 10}
    with launch(25) as (_, ranks):
        with ThreadPoolExecutor(len(lost)) as pool:
            list(pool.map(lambda rank: ranks[rank].stop(says_goodbye=False), lost))
        for failure in failures(ranks, lost):
            assert failure is not None and failure.kind == "lost" and failure.rank in lost


def test_a_rank_that_says_goodbye_is_not_lost_and_no_key_is_left() -> None:
    with launch(12) as (store, ranks):
        until = time.monotonic() + SOON
        while any(rank.tree.missing_children for rank in ranks) and time.monotonic() < until:
            time.sleep(0.02)
        for rank in (11, 0):
            ranks[rank].stop(says_goodbye=True)
        time.sleep(0.3)
        assert all(rank.failure is None for rank in ranks)
        assert store.num_keys() == 0


def test_of_ranks_that_wait_one_asks_and_the_slow_one_names_itself() -> None:
    with launch(11) as (_, ranks):
        for rank in ranks:
            rank.set_status(f"{WAITING} for all ranks in barrier")
        ranks[10].set_status("reading data")
        assert ranks[4].find_failure(asks=True) == Failure("slow", 10, "reading data")
        assert set(failures(ranks, set())) == {Failure("slow", 10, "reading data")}


def test_a_silent_rank_is_lost_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with launch(3, timeout=1.5) as (_, ranks):
        monkeypatch.setattr(ranks[2].tree, "_send_all", lambda *_, **__: None)  # it is frozen; its connection is intact
        started = time.monotonic()
        assert {failure.rank for failure in failures(ranks, {2}) if failure} == {2}
        assert 1.0 < time.monotonic() - started < 5.0


def test_a_rank_that_never_connected_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness_module, "_REPORT_SECONDS", 0.2)
    with launch(2) as (_, ranks):
        assert ranks[0].find_failure(asks=False) is None
        ranks[0].tree.missing_children.add(1)  # as if it had ended before it connected
        assert ranks[0].find_failure(asks=False) == Failure("lost", 1, None)


def test_the_error_of_one_rank_is_printed_once_and_reaches_all() -> None:
    with launch(10) as (_, ranks):
        printed: list[int] = []
        with ThreadPoolExecutor(10) as pool:
            list(
                pool.map(
                    lambda rank: ranks[rank].publish_error("DataError\nx", lambda: printed.append(rank)), range(10)
                )
            )
        assert len(printed) == 1
        assert set(failures(ranks, set())) == {Failure("error", printed[0], "DataError\nx")}


@pytest.mark.parametrize("secret", [SECRET, None])
def test_strangers_cannot_join_the_tree_or_send_messages(secret: bytes | None) -> None:
    with launch(2, secret=secret) as (_, ranks):
        server = ranks[0].tree._server
        assert server is not None
        ranks[0].tree.missing_children.add(1)
        message = json.dumps(["message", Failure("lost", 1, None).dump()]).encode() + b"\n"
        for hello in (b'["1", "wrong"]\n', b'["7", ""]\n', b"\xff\n", b"[" * 9999 + b"\n", b"[1, 2]\n"):
            with socket.create_connection(server.getsockname()) as stranger:
                stranger.settimeout(SOON)
                stranger.sendall(hello + message)
                assert stranger.recv(1) == b""  # it is turned away
        # Even the connection of a rank carries only what has this run's signature, if the run has a secret.
        to_parent = ranks[1].tree._connections[0].socket
        to_parent.send(message if secret else b"not json\n")
        time.sleep(0.3)
        assert ranks[0].failure is None and ranks[0].tree._thread.is_alive()


@given(st.integers(1, 300), st.data())
def test_the_first_missing_key_is_found_in_few_calls(num_keys: int, data: st.DataObject) -> None:
    missing = data.draw(st.sets(st.integers(0, num_keys - 1), min_size=1))
    num_calls = 0

    def check(keys: list[str]) -> bool:
        nonlocal num_calls
        num_calls += 1
        return not any(int(key) in missing for key in keys)

    assert first_missing(check, [str(key) for key in range(num_keys)]) == min(missing)
    assert num_calls <= num_keys.bit_length()
