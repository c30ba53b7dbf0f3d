"""StoreHosts: the key-value store of a run with a launcher per replica; if its host is lost, another one takes over.

Each replica is started by a launcher of its own, such as one torchrun per node, and says where it can host a store:

    STRETTO_HOSTS=node0:29400,node1:29400,node2:29400    the same on all nodes: one address per replica
    STRETTO_REPLICA=1                                    which of them this is

The first rank of each replica hosts a store there; the ranks use that of the first replica, until it is lost. What was
in it is not needed any more: the ranks say again which round they were in.
"""

import math
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from stretto.base.errors import ConfigError, LostPeerError, MeshError
from stretto.mesh.c10d import TCPStore
from stretto.mesh.join import run_store_of
from stretto.mesh.launch_info import LaunchInfo, find_launch_info
from stretto.mesh.rounds import LIVE_SCOPE, read_current
from stretto.mesh.signed_store import SignedStore
from stretto.mesh.store import host_store
from stretto.mesh.timeouts import OperationTimeoutError, call_with_timeout
from stretto.mesh.topology import Topology

HOSTS_VARIABLE, REPLICA_VARIABLE = "STRETTO_HOSTS", "STRETTO_REPLICA"
_CONNECT_SECONDS = 0.5
# The kernel repeats a lost first packet after 1 s and 3 s.
_PATIENCE_SECONDS = 5.0
# A host that is stopped (SIGSTOP) accepts connections, and then says nothing.
_ANSWER_SECONDS = 3.0
_SILENT_SECONDS = 20.0  # until such a host is asked again by those who look for the run
_PAUSE_SECONDS = 0.1
_LOOPBACK = ("127.0.0.1", "::1")  # all replicas are on one machine; a name of loopback may be known elsewhere, too
_RUN_ID = "hosts"


@dataclass(frozen=True)
class HostAddress:
    host: str
    port: int

    @staticmethod
    def parse(text: str) -> "HostAddress":
        host, _, port = text.strip().rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(f"{HOSTS_VARIABLE} has {text!r}, which is not host:port; use a host name and a port")
        return HostAddress(host.strip("[]"), int(port))

    def answers(self, patience: float = 0.0) -> bool:
        """Return whether something listens there; unless it refuses, ask again for so many seconds."""
        deadline = time.monotonic() + patience
        while True:
            try:
                socket.create_connection((self.host, self.port), _CONNECT_SECONDS).close()
                return True
            except ConnectionRefusedError:
                return False
            except OSError:
                if time.monotonic() >= deadline:
                    return False
            time.sleep(_PAUSE_SECONDS)


def find_slot(variables: Mapping[str, str], topology: Topology) -> LaunchInfo:
    """Return the slot of this process, as the rank among all that the layout has."""
    base = find_launch_info(variables)
    if HOSTS_VARIABLE not in variables:
        if REPLICA_VARIABLE in variables:
            raise ConfigError(
                f"{REPLICA_VARIABLE} is set, but {HOSTS_VARIABLE} is not; set it to one address per replica"
            )
        if base is None:
            raise MeshError(
                "live recovery needs several ranks; start them with stretto train, or one torchrun per replica with "
                f"{HOSTS_VARIABLE} and {REPLICA_VARIABLE}"
            )
        return base
    hosts, replica = variables[HOSTS_VARIABLE].split(","), variables.get(REPLICA_VARIABLE, "")
    if len(hosts) != topology.num_replicas:
        raise ConfigError(
            f"{HOSTS_VARIABLE} has {len(hosts)} addresses, but the layout has {topology.num_replicas} replicas; use "
            "one for each"
        )
    if not replica.isdecimal() or int(replica) >= len(hosts):
        raise ConfigError(f"{REPLICA_VARIABLE}={replica!r} is not one of 0 to {len(hosts) - 1}; set it on each node")
    size, column = (1, 0) if base is None else (base.size, base.rank)
    if size != topology.num_columns:
        raise MeshError(
            f"the launcher of replica {replica} started {size} ranks, but a replica has {topology.num_columns}; start "
            "as many"
        )
    first = HostAddress.parse(hosts[0])
    return LaunchInfo(
        topology.rank(int(replica), column), topology.size, 0 if base is None else base.local_rank,
        1 if base is None else base.local_size, first.host, first.port, has_agent_store=True, run_id=_RUN_ID,
    )  # fmt: skip


@dataclass(frozen=True)
class _Answer:
    """A store, and the number of the last round in it; -1 if there is none yet."""

    store: SignedStore
    round: int


class StoreHosts:
    """The stores of all replicas, of which `index` is in use."""

    def __init__(self, hosts: str, topology: Topology, slot: int, timeout: timedelta, secret: bytes | None) -> None:
        self._addresses = [HostAddress.parse(text) for text in hosts.split(",")]
        self._timeout, self._secret = timeout, secret
        self._silent_until = [0.0] * len(self._addresses)
        self.index = 0
        position = topology.position(slot)
        self._server = None
        if position.stage == 0 and not position.span:
            address = self._addresses[position.replica]
            self._server = host_store(
                address.host, address.port, topology.size, timeout, is_single_node=address.host in _LOOPBACK,
                setting=HOSTS_VARIABLE,
            )  # fmt: skip

    @property
    def address(self) -> HostAddress:
        """That of the store in use."""
        return self._addresses[self.index]

    def find(self) -> SignedStore:
        """Return the store where the run is under way, or where it begins; for a new process."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        while True:
            stores = self._ask_all()
            self.index = max(stores, key=lambda index: (stores[index].round, -index), default=0)
            # Without a round, the run begins at the first replica, unless that does not come.
            if stores and (stores[self.index].round >= 0 or self.index == 0 or time.monotonic() > deadline):
                return stores[self.index].store
            if time.monotonic() > deadline:
                raise LostPeerError(
                    f"no address of {HOSTS_VARIABLE} answers within {self._timeout.total_seconds():.0f} s; check that "
                    "the replicas were started there"
                )
            time.sleep(_PAUSE_SECONDS)

    def move(self) -> SignedStore:
        """Return the store of the next replica that answers, because the one in use is lost."""
        count, seconds = len(self._addresses), self._timeout.total_seconds()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for index in ((self.index + distance) % count for distance in range(1, count)):
                # All ranks must take the same store. So one that does not refuse connections is not passed over soon:
                # it may only be slow, and others may have waited for it.
                if (answer := self._ask(index, seconds, _PATIENCE_SECONDS)) is not None:
                    self.index = index
                    return answer.store
            time.sleep(_PAUSE_SECONDS)
        raise LostPeerError("no other replica answers; start the run again")

    def has_moved(self) -> bool:
        """Return whether the run is under way with another store than the one in use."""
        rounds = {index: answer.round for index, answer in self._ask_all().items()}
        return max(rounds.values(), default=-1) > rounds.get(self.index, math.inf)

    def _ask_all(self) -> dict[int, "_Answer"]:
        """Return what the stores say that answer soon, by index."""
        now = time.monotonic()
        awake = [index for index, until in enumerate(self._silent_until) if now >= until]
        answers = {index: self._ask(index, _ANSWER_SECONDS) for index in awake}
        return {index: answer for index, answer in answers.items() if answer is not None}

    def _ask(self, index: int, seconds: float, patience: float = 0.0) -> "_Answer | None":
        """Return what a store says; None if its host is gone, or says nothing for so many seconds."""
        if not self._addresses[index].answers(patience):
            return None
        try:
            return call_with_timeout(seconds, partial(self._read_round, index))
        except OperationTimeoutError:
            # The thread of the call, and its connection, may stay for as long as the host is silent.
            self._silent_until[index] = time.monotonic() + _SILENT_SECONDS
        except RuntimeError:
            pass  # the host has gone meanwhile
        return None

    def _read_round(self, index: int) -> "_Answer":
        store = self._open(index)
        return _Answer(store, read_current(store))

    def _open(self, index: int) -> SignedStore:
        address = self._addresses[index]
        store = TCPStore(address.host, address.port, is_master=False, timeout=self._timeout, wait_for_workers=False)
        return run_store_of(store, self._secret, _RUN_ID).in_scope(LIVE_SCOPE)
