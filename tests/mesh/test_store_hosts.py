"""StoreHosts: each replica hosts a store at its own address, and says which setting is wrong if it can't."""

import socket
from datetime import timedelta

import pytest

from stretto.base.errors import MeshError
from stretto.launch.rank_environment import free_port
from stretto.mesh.store_hosts import StoreHosts
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


def test_only_the_first_rank_of_a_replica_hosts_a_store() -> None:
    address = f"127.0.0.1:{free_port()}"
    hosts = StoreHosts(f"{address},{address}", Topology(2, 2), 1, TIMEOUT, None)
    assert not hosts.address.answers()
