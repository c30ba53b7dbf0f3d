"""StoreHosts: each replica hosts a store at its own address, and says which setting is wrong if it can't."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest

from stretto.base.errors import ConfigError, LostPeerError, MeshError
from stretto.launch.rank_environment import free_port
from stretto.mesh.store_hosts import HostAddress, StoreHosts, find_slot
from stretto.mesh.topology import Topology

TIMEOUT = timedelta(seconds=5)


def make_hosts(hosts: str, slot: int = 0) -> StoreHosts:
    return StoreHosts(hosts, Topology(2, 1), slot, TIMEOUT, b"0123456789abcdef")


def test_an_address_in_use_is_an_error_that_names_the_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(MeshError, match=rf"^port {port} on 127.0.0.1 is in use, .*; set STRETTO_HOSTS to a free"):
            make_hosts(f"127.0.0.1:{port},127.0.0.1:{free_port()}")


def test_a_host_that_must_listen_on_all_interfaces_warns(caplog: pytest.LogCaptureFixture) -> None:
    make_hosts(f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}")
    assert not caplog.records
    # Other nodes may resolve the name to another address than this one.
    make_hosts(f"localhost:{free_port()},other.invalid:29400")
    (message,) = caplog.messages
    assert "listens on all interfaces, because localhost is loopback here" in message
    assert message.endswith("set STRETTO_HOSTS to one of them")


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^STRETTO_REPLICA is set, but STRETTO_HOSTS is not; set it to one address"):
        find_slot({"STRETTO_REPLICA": "1"}, Topology(2, 1))
    with pytest.raises(MeshError, match=r"^live recovery needs several ranks; start them with stretto train, or one"):
        find_slot({}, Topology(2, 1))


def test_only_the_first_rank_of_a_replica_hosts_a_store() -> None:
    address = f"127.0.0.1:{free_port()}"
    hosts = StoreHosts(f"{address},{address}", Topology(2, 2), 1, TIMEOUT, None)
    assert not hosts.address.answers()


@contextmanager
def stopped_host() -> Iterator[tuple[int, int]]:
    """Yield process id and port of a host that is stopped: the kernel accepts connections for it."""
    port = free_port()
    code = (
        "import sys, time; from stretto.mesh.c10d import TCPStore; "
        f"store = TCPStore('127.0.0.1', {port}, is_master=True, wait_for_workers=False); print(flush=True); "
        "time.sleep(120)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as host:
        try:
            assert host.stdout is not None and host.stdout.readline()
            os.kill(host.pid, signal.SIGSTOP)
            yield host.pid, port
        finally:
            host.kill()


def test_a_host_that_is_stopped_does_not_stop_others_from_joining() -> None:
    with stopped_host() as (_, port):
        hosts = make_hosts(f"127.0.0.1:{free_port()},127.0.0.1:{port}")
        assert HostAddress("127.0.0.1", port).answers()
        started = time.monotonic()
        hosts.find()
        assert hosts.index == 0 and not hosts.has_moved()
        with pytest.raises(LostPeerError, match="no other replica answers"):
            hosts.move()
        assert time.monotonic() - started < 20


def test_a_host_that_is_only_slow_is_not_passed_over() -> None:
    """Otherwise the ranks that found it slow would take another store than those that did not."""
    with stopped_host() as (process, port):
        addresses = f"127.0.0.1:{free_port()},127.0.0.1:{port},127.0.0.1:{free_port()}"
        hosts = StoreHosts(addresses, Topology(3, 1), 2, timedelta(seconds=20), b"0123456789abcdef")
        timer = threading.Timer(4.5, os.kill, (process, signal.SIGCONT))
        timer.start()
        hosts.move()
        timer.join()
    assert hosts.index == 1
