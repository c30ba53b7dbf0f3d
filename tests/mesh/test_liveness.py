"""Failures reach all ranks through the tree, and name the right rank; what is not from a rank is ignored."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.mesh import liveness as liveness_module
from stretto.mesh import rank_tree
from stretto.mesh.c10d import HashStore
from stretto.mesh.launch_info import LaunchInfo
from stretto.mesh.liveness import WAITING, Failure, Liveness
from stretto.mesh.rank_store import RankStore, first_missing
from stretto.mesh.rank_tree import RankTree
from stretto.mesh.signed_store import SignedStore
from stretto.mesh.topology import Topology
from stretto.mesh.world import World

SECRET = b"0123456789abcdef"
SOON = 10.0


def join(store: HashStore, rank: int, size: int, timeout: float = 60.0, secret: bytes | None = SECRET) -> Liveness:
    info = LaunchInfo(rank, size, rank, size, "127.0.0.1", 0)
    return Liveness(SignedStore(store, secret).in_scope("launch"), info, timedelta(seconds=timeout))


@contextmanager
def launch(
    size: int, timeout: float = 60.0, secret: bytes | None = SECRET
) -> Iterator[tuple[HashStore, list[Liveness]]]:
    """Connect all ranks, each as in a process of its own."""
    store = HashStore()
    with ThreadPoolExecutor(size) as pool:
        ranks = list(pool.map(lambda rank: join(store, rank, size, timeout, secret), range(size)))
    try:
        yield store, ranks
    finally:
        with ThreadPoolExecutor(size) as pool:
            list(pool.map(lambda rank: rank.stop(says_goodbye=True), ranks))


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + SOON
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    assert condition()


def disconnect(monkeypatch: pytest.MonkeyPatch, *children: int) -> None:
    """Let these ranks fail to connect to their parents, as behind a firewall."""
    connect = RankTree._connect

    def connect_others(tree: RankTree, parent: int) -> socket.socket:
        if tree._launch_info.rank in children:
            raise OSError("no route to host")
        return connect(tree, parent)

    monkeypatch.setattr(RankTree, "_connect", connect_others)


def freeze(monkeypatch: pytest.MonkeyPatch, rank: Liveness) -> None:
    """Let a rank send nothing and read nothing; its connections stay intact."""
    monkeypatch.setattr(rank.tree, "_send", lambda *_: None)
    monkeypatch.setattr(rank.tree, "_on_message", lambda *_: None)
    monkeypatch.setattr(rank.tree, "_find_silent_ranks", lambda *_: None)


def failures(ranks: list[Liveness], without: set[int]) -> list[Failure | None]:
    until = time.monotonic() + SOON
    for number, rank in enumerate(ranks):
        if number not in without:
            rank._has_failed.wait(max(0.0, until - time.monotonic()))
    return [rank.failure for number, rank in enumerate(ranks) if number not in without]


@pytest.mark.parametrize("victim", [0, 1, 7, 24])
def test_all_ranks_name_a_lost_rank_and_what_it_did_last(victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_tree, "_PERIOD_SECONDS", 0.2)
    with launch(25) as (_, ranks):
        ranks[victim].set_status("in F0.1 of window 9")
        time.sleep(0.5)  # until it has sent a heartbeat
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
        wait_until(lambda: not any(rank.tree.missing_children for rank in ranks))
        for liveness in ranks:
            liveness.tree.delete_keys()
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
    monkeypatch.setattr(rank_tree, "_PERIOD_SECONDS", 0.1)
    with launch(3, timeout=1.5) as (_, ranks):
        freeze(monkeypatch, ranks[2])
        started = time.monotonic()
        assert {failure.rank for failure in failures(ranks, {2}) if failure} == {2}
        assert 1.0 < time.monotonic() - started < 5.0


def test_a_frozen_rank_is_lost_soon_after_a_rank_that_waited_before_it_froze_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_tree, "_PERIOD_SECONDS", 0.2)
    monkeypatch.setattr(liveness_module, "_REPORT_SECONDS", 0.3)
    with launch(12, timeout=60.0) as (_, ranks):
        for rank in ranks:
            rank.set_status(f"{WAITING} for all ranks in barrier")
        ranks[10].set_status("in F0.1 of window 9")
        time.sleep(0.6)  # until it has sent a heartbeat
        freeze(monkeypatch, ranks[10])
        # When rank 4 gives up, its connections break, so others look for a reason without having waited for long.
        others = [rank for rank in ranks if rank is not ranks[10]]
        with ThreadPoolExecutor(len(others)) as pool:
            found = set(pool.map(lambda rank: rank.find_failure(asks=rank is ranks[4]), others))
        assert found == {Failure("lost", 10, "in F0.1 of window 9")}


def test_the_question_of_all_ranks_is_sent_once_over_each_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    num_questions = 0
    on_message = Liveness._on_message

    def count(liveness: Liveness, text: str, source: int) -> None:
        nonlocal num_questions
        num_questions += text == liveness_module._QUESTION
        on_message(liveness, text, source)

    monkeypatch.setattr(Liveness, "_on_message", count)
    monkeypatch.setattr(liveness_module, "_REPORT_SECONDS", 0.2)
    monkeypatch.setattr(rank_tree, "_MIN_SILENT_PERIODS", 1.5)
    with launch(20) as (_, ranks):
        for rank in ranks:
            rank.set_status(f"{WAITING} for all ranks in barrier")
        with ThreadPoolExecutor(20) as pool:
            assert set(pool.map(lambda rank: rank.find_failure(asks=True), ranks)) == {None}
    assert 19 <= num_questions <= 2 * 19  # once in each direction if all ask at the same time


def test_a_rank_that_never_connected_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness_module, "_REPORT_SECONDS", 0.2)
    alone = join(HashStore(), 0, 2)
    assert alone.find_failure(asks=False) == Failure("lost", 1, None)
    alone.stop(says_goodbye=True)


def test_ranks_that_cannot_connect_learn_of_failures_and_are_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness_module, "_REPORT_SECONDS", 0.2)
    monkeypatch.setattr(liveness_module, "_CUT_OFF_SECONDS", 0.1)
    disconnect(monkeypatch, 1)
    with launch(11) as (_, ranks):
        assert ranks[1].tree.connect_error == "no route to host"
        wait_until(lambda: ranks[0].tree.missing_children == {1})
        time.sleep(0.2)
        assert ranks[0].find_failure(asks=False) is None
        ranks[2].stop(says_goodbye=False)
        # Rank 1 learns of it from the store, and tells ranks 9 and 10.
        assert set(failures(ranks, {2})) == {Failure("lost", 2, "starting")}


def test_ranks_above_those_that_cannot_connect_learn_of_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_tree, "_CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(liveness_module, "_CUT_OFF_SECONDS", 0.1)
    disconnect(monkeypatch, 1)
    with launch(11) as (_, ranks):
        wait_until(lambda: ranks[0]._store_watch is not None and not ranks[1].tree.missing_children)
        ranks[9].stop(says_goodbye=False)
        assert set(failures(ranks, {9})) == {Failure("lost", 9, "starting")}


def test_a_goodbye_in_the_middle_of_the_tree_does_not_hide_a_failure_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness_module, "_CUT_OFF_SECONDS", 0.1)
    with launch(19) as (_, ranks):
        wait_until(lambda: not any(rank.tree.missing_children for rank in ranks))
        ranks[1].stop(says_goodbye=True)
        time.sleep(0.3)
        ranks[18].stop(says_goodbye=False)  # a child of rank 2
        assert set(failures(ranks, {1, 18})) == {Failure("lost", 18, "starting")}


def test_a_full_send_buffer_delays_a_message_and_does_not_lose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_tree, "_MAX_BUFFER_BYTES", 64 << 20)
    with launch(2) as (_, ranks):
        wait_until(lambda: not ranks[0].tree.missing_children)
        receive = rank_tree.RankTree._receive
        monkeypatch.setattr(rank_tree.RankTree, "_receive", lambda *_: time.sleep(0.01))  # nobody reads
        filler = "x" * (1 << 20)
        for _ in range(8):
            ranks[0].tree.send(filler)
        assert ranks[0].tree._connections[0].unsent
        monkeypatch.setattr(rank_tree.RankTree, "_receive", receive)
        ranks[0].report(Failure("slow", 0, "busy"))
        assert set(failures(ranks, set())) == {Failure("slow", 0, "busy")}


def test_a_neighbor_that_reads_nothing_is_lost_when_too_much_is_unsent(monkeypatch: pytest.MonkeyPatch) -> None:
    with launch(2) as (_, ranks):
        wait_until(lambda: not ranks[0].tree.missing_children)
        monkeypatch.setattr(ranks[1].tree, "_receive", lambda *_: time.sleep(0.01))
        for _ in range(40):
            ranks[0].tree.send("x" * (1 << 19))
        assert set(failures(ranks, {1})) == {Failure("lost", 1, "starting")}


def test_a_child_that_is_turned_away_does_not_report_its_parent_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankTree, "_welcome", lambda *_: False)
    with launch(2) as (_, ranks):
        wait_until(lambda: ranks[1].tree.connect_error is not None)
        assert ranks[1].tree.connect_error == "rank 0 closed the connection"
        assert [rank.failure for rank in ranks] == [None, None]


def test_a_rank_whose_thread_has_failed_learns_from_the_store(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(liveness_module, "_CUT_OFF_SECONDS", 0.1)
    with launch(3) as (_, ranks):
        ranks[2].status = 7
        monkeypatch.setattr(ranks[2].tree, "_status", lambda: 1 / 0)
        wait_until(lambda: ranks[2].tree.connect_error is not None)
        assert "rank 2 no longer watches other ranks" in caplog.text
        assert {failure.rank for failure in failures(ranks, set()) if failure} == {2}


def test_messages_about_ranks_that_do_not_exist_are_ignored() -> None:
    with launch(2, secret=None) as (store, ranks):
        ranks[0].tree.send(Failure("lost", 2, None).dump())
        store.set("launch/failure", Failure("lost", 2, None).dump())
        ranks[1].read_store()
        time.sleep(0.1)
        assert ranks[1].failure is None


@pytest.mark.parametrize(("prefix", "rank"), [("2", 2), ("3", 0), ("-1", 0), ("2 ", 0), ("9" * 5000, 0), ("", 0)])
def test_an_error_in_the_store_keeps_the_rank_that_published_it(prefix: str, rank: int) -> None:
    with launch(3, secret=None) as (store, ranks):
        store.set("launch/error", f"{prefix}\nDataError\nshard 7 is damaged")
        ranks[1].read_store()
        assert ranks[1].failure == Failure("error", rank, "DataError\nshard 7 is damaged")


def test_a_lost_rank_that_the_layout_leaves_out_is_named_without_its_position() -> None:
    with launch(3) as (_, ranks):
        world = World(0, 3, torch.device("cpu"), ranks[0], topology=Topology(num_replicas=2, num_stages=1))
        ranks[2].stop(says_goodbye=False)
        assert str(world.transfer_error(1, "sending")).startswith("rank 0 lost rank 2 (last seen starting) while")


def test_no_thread_is_left_when_a_wait_for_a_key_ends() -> None:
    threads = set(threading.enumerate())
    store = RankStore(SignedStore(HashStore()))
    assert not store.wait_for_keys(["missing"], 0.2)

    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        store.wait_for_keys(["missing"], 60.0, fail)
    assert set(threading.enumerate()) <= threads


def test_a_node_whose_name_is_that_of_loopback_listens_at_another_address() -> None:
    info = LaunchInfo(0, 2, 0, 1, "127.0.0.1", 1)
    try:
        host = rank_tree._own_host(info)
    except OSError:
        pytest.skip("this machine has no other address")
    assert not host.startswith("127.")


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
def test_unauthenticated_connections_cannot_join_the_tree_or_send_messages(
    secret: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_tree, "_UNKNOWN_SECONDS", 0.5)
    store = HashStore()
    parent = join(store, 0, 2, secret=secret)
    server = parent.tree._server
    assert server is not None
    address = server.getsockname()
    message = json.dumps(["message", Failure("lost", 1, None).dump()]).encode() + b"\n"
    hellos = (
        b'["1", "wrong"]\n', b'["7", ""]\n', '["\u00b2", ""]\n'.encode(), b"\xff\n", b"[" * 9999 + b"\n",
        b"[1, 2]\n", b"x" * 5000, b"",
    )  # fmt: skip
    for hello in hellos:
        with socket.create_connection(address) as unknown:
            unknown.settimeout(SOON)
            unknown.sendall(hello + message if hello.endswith(b"\n") else hello)
            with suppress(ConnectionResetError):
                assert unknown.recv(1) == b""  # it is turned away
    child = join(store, 1, 2, secret=secret)
    wait_until(lambda: not parent.tree.missing_children)
    with pytest.raises(ConnectionError):  # when all children are there, nobody else can connect
        socket.create_connection(address).close()
    # Even the connection of a rank carries only what has this run's signature, if the run has a secret.
    child.tree._connections[0].socket.send(message if secret else b"not json\n")
    time.sleep(0.3)
    assert parent.failure is None and parent.tree._thread.is_alive()
    for rank in (child, parent):
        rank.stop(says_goodbye=True)


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
