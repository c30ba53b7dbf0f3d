"""Heartbeats: each rank hears from the next one every second, over a TCP connection of their own.

    rank 0 ◄──heartbeats── rank 1 ◄──heartbeats── rank 2 ◄──heartbeats── rank 3 ◄──heartbeats── rank 0

If a process dies, its connection breaks at once; if its node or network is down, no heartbeat arrives. A rank that ends
as planned says goodbye first. The threads wait in Python's sockets: waiting in torch's C++, they would abort a process
that ends meanwhile.
"""

import hmac
import ipaddress
import secrets
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta

from stretto.mesh.launch_info import LaunchInfo
from stretto.mesh.signed_store import SignedStore

_PERIOD_SECONDS = 1.0
_CONNECT_SECONDS = 30.0
_HEARTBEAT, _GOODBYE = b"\1", b"\0"
_TOKEN_LENGTH = 32


class Heartbeats:
    """Sends heartbeats to the previous rank and receives those of the next one. Every rank must create it.

    `problem` says why this rank can't watch the next one; None if it can.
    """

    def __init__(self, store: SignedStore, launch_info: LaunchInfo, timeout: timedelta) -> None:
        self.next_rank = (launch_info.rank + 1) % launch_info.size
        self.problem: str | None = None
        self._timeout = timeout.total_seconds()
        self._last_heard = time.monotonic()
        self._is_connected, self._has_said_goodbye = True, False
        self._stopped, self._says_goodbye = threading.Event(), False
        self._token = secrets.token_hex(_TOKEN_LENGTH // 2)  # proves to us that a connection is from the previous rank
        self._to_previous: socket.socket | None = None
        # Threads of their own: both wait for as long as the other rank makes them wait.
        self._sender = threading.Thread(target=self._send, daemon=True)
        key = f"heartbeats/{launch_info.rank}"
        try:
            host = _own_host(launch_info)
            self._server = socket.create_server((host, 0), family=_family(host))
            store.set(key, f"{self._token} {self._server.getsockname()[1]} {host}")
            self._sender.start()
        except OSError:
            store.set(key, "")  # so that the previous rank doesn't wait for it
        try:
            self._from_next = self._connect(store)
            threading.Thread(target=self._listen, daemon=True).start()
        except (OSError, RuntimeError) as error:
            self.problem = str(error).splitlines()[0]

    def stop(self, *, says_goodbye: bool) -> None:
        """Stop sending. Without a goodbye, the previous rank sees this one as lost as soon as its process ends."""
        self._says_goodbye = says_goodbye
        self._stopped.set()
        if self._sender.is_alive():
            self._sender.join(_PERIOD_SECONDS)

    def is_next_rank_lost(self) -> bool:
        """Return whether the next rank's process is gone, or has been silent for too long."""
        if self.problem is not None or self._has_said_goodbye:
            return False
        return not self._is_connected or time.monotonic() - self._last_heard > self._timeout

    def _connect(self, store: SignedStore) -> socket.socket:
        key = f"heartbeats/{self.next_rank}"
        store.wait([key], timedelta(seconds=_CONNECT_SECONDS))
        token, port, host = ((store.get(key) or "") + "  ").split(" ", 2)
        if not port.isdecimal():
            raise OSError(f"rank {self.next_rank} has no address that other nodes can reach")
        connection = socket.create_connection((host.strip(), int(port)), timeout=_CONNECT_SECONDS)
        connection.sendall(token.encode())
        connection.settimeout(None)
        return connection

    def _send(self) -> None:
        with suppress(OSError):  # the previous rank is lost; the rank before it finds out
            with self._server:
                self._to_previous = self._accept()
            while not self._stopped.wait(_PERIOD_SECONDS):
                self._to_previous.sendall(_HEARTBEAT)
            if self._says_goodbye:
                self._to_previous.sendall(_GOODBYE)
                self._to_previous.close()

    def _accept(self) -> socket.socket:
        """Return the connection from the previous rank; others don't know the token, and are turned away."""
        while True:
            connection, _ = self._server.accept()
            connection.settimeout(_PERIOD_SECONDS)
            with suppress(OSError):
                token = connection.recv(_TOKEN_LENGTH, socket.MSG_WAITALL)
                if hmac.compare_digest(token, self._token.encode()):
                    connection.settimeout(None)
                    return connection
            connection.close()

    def _listen(self) -> None:
        with self._from_next, suppress(OSError):
            while data := self._from_next.recv(64):
                self._last_heard = time.monotonic()
                if _GOODBYE in data:
                    self._has_said_goodbye = True
                    return
        self._is_connected = False


def _own_host(launch_info: LaunchInfo) -> str:
    """Return the address of this node at which the other nodes reach it: the one on the way to rank 0's node."""
    if launch_info.local_size == launch_info.size:
        return "127.0.0.1"
    family, _, _, _, target = socket.getaddrinfo(launch_info.address, launch_info.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        host = str(probe.getsockname()[0])
    if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        raise OSError(f"{launch_info.address} is a loopback address on this node")
    return host


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
