"""RankTree: each rank has a TCP connection to its parent and to its children, and hears from them every second.

                    rank 0
        ┌──────────┬──┴───────┬─── ... ──┐
      rank 1     rank 2     rank 3     rank 8         the parent of rank r is rank (r - 1) // 8
     ┌──┴ ... ─┐
   rank 9   rank 16

If a process dies, its connections break at once; if its node or network is down, no heartbeat arrives. So its parent
and its children know which rank is lost. Messages are passed on along the tree: to 4,096 ranks, they take at most eight
hops, and no rank sends more than nine. A rank that ends as planned says goodbye first.

The thread waits in Python's sockets: waiting in torch's C++, it would abort a process that ends meanwhile.
"""

import hmac
import ipaddress
import json
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

from stretto.mesh.launch_info import LaunchInfo
from stretto.mesh.signed_store import SignedStore

_FANOUT = 8
_PERIOD_SECONDS = 1.0
_CONNECT_SECONDS = 30.0
_FLUSH_SECONDS = 1.0
_MAX_LINE_BYTES = 1 << 20
_MAX_STRANGERS = 64  # connections that have not shown yet that they are from a child
_HEARTBEAT, _MESSAGE, _GOODBYE = "heartbeat", "message", "goodbye"
_MESSAGE_KEY = "tree"  # what the signatures of messages are for


@dataclass(eq=False)
class _Connection:
    socket: socket.socket
    rank: int | None  # at the other end; None until it has shown that it is a child
    received: bytearray = field(default_factory=bytearray)  # an incomplete line
    last_heard: float = field(default_factory=time.monotonic)
    status: str | None = None
    is_clogged: bool = False  # the other rank does not read, and a line was cut off


class RankTree:
    """Exchanges heartbeats and messages with the parent and the children of this rank. Every rank must create it.

    Its thread calls `on_message` with each text that another rank has sent, and `on_lost` with a rank whose process is
    gone, or that has been silent for too long, and its last status. `problem` says why this rank can't connect to its
    parent; None if it can.
    """

    def __init__(
        self,
        store: SignedStore,
        launch_info: LaunchInfo,
        timeout: timedelta,
        status: Callable[[], str],
        on_message: Callable[[str], None],
        on_lost: Callable[[int, str | None], None],
    ) -> None:
        rank = launch_info.rank
        self.parent = None if rank == 0 else (rank - 1) // _FANOUT
        self.missing_children = set(range(rank * _FANOUT + 1, min((rank + 1) * _FANOUT + 1, launch_info.size)))
        self.problem: str | None = None
        self._store, self._launch_info, self._timeout = store, launch_info, timeout.total_seconds()
        self._status, self._on_message, self._on_lost = status, on_message, on_lost
        self._key = f"tree/{rank}"
        self._token = secrets.token_hex(16)  # shows that a connection is meant for this rank of this launch
        self._connections: list[_Connection] = []
        self._outbox: deque[tuple[str, threading.Event]] = deque()  # messages of other threads
        self._is_stopped = self._says_goodbye = False
        self._selector = selectors.DefaultSelector()
        self._wake_up, self._wake_up_receiver = socket.socketpair()
        self._selector.register(self._wake_up_receiver, selectors.EVENT_READ, partial(self._wake_up_receiver.recv, 64))
        self._server = self._listen() if self.missing_children else None
        if self.parent is not None:
            try:
                self._add(self._connect(self.parent), self.parent)
            except (OSError, RuntimeError) as error:
                self.problem = str(error).splitlines()[0]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, text: str) -> None:
        """Send a message to all ranks, except this one; return when it has left this rank."""
        if threading.current_thread() is self._thread:
            self._send_all(self._message_line(text))
            return
        is_sent = threading.Event()
        self._outbox.append((text, is_sent))
        self._wake()
        is_sent.wait(_FLUSH_SECONDS)

    def stop(self, *, says_goodbye: bool) -> None:
        """Close all connections. Without a goodbye, the other ranks see this one as lost."""
        if not self._is_stopped:
            self._is_stopped, self._says_goodbye = True, says_goodbye
            self._wake()
            self._thread.join(_PERIOD_SECONDS)

    def _wake(self) -> None:
        with suppress(OSError):
            self._wake_up.send(b"\0")

    def _run(self) -> None:
        next_heartbeat = 0.0
        while not self._is_stopped:
            for key, _ in self._selector.select(max(0.0, next_heartbeat - time.monotonic())):
                key.data()
            while self._outbox:
                text, is_sent = self._outbox.popleft()
                self._send_all(self._message_line(text))
                is_sent.set()
            now = time.monotonic()
            if now >= next_heartbeat:
                if 0 < next_heartbeat < now - self._timeout / 2:
                    # It was this process that was frozen, and nobody could be heard.
                    for connection in self._connections:
                        connection.last_heard = now
                self._send_all(_line(_HEARTBEAT, self._status()))
                self._find_silent_ranks(now)
                next_heartbeat = now + _PERIOD_SECONDS
        if self._says_goodbye:
            self._send_all(_line(_GOODBYE))
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()
        for own_socket in (self._server, self._wake_up, self._wake_up_receiver):
            if own_socket is not None:
                own_socket.close()

    def _find_silent_ranks(self, now: float) -> None:
        for connection in list(self._connections):
            if now - connection.last_heard > self._timeout:
                if connection.rank is not None:
                    self._on_lost(connection.rank, connection.status)  # it may hear of it later, so it stays connected
                    connection.last_heard = now
                else:
                    self._drop(connection)

    def _send_all(self, line: bytes, source: _Connection | None = None) -> None:
        for connection in self._connections:
            if connection is not source and connection.rank is not None and not connection.is_clogged:
                try:
                    connection.is_clogged = connection.socket.send(line) < len(line)
                except OSError:
                    connection.is_clogged = True  # `_receive` finds out if the connection is broken

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        connection.received += data
        connection.last_heard = time.monotonic()
        *lines, rest = bytes(connection.received).split(b"\n")
        connection.received = bytearray(rest)
        for line in lines:
            if not self._read_line(connection, line):
                self._drop(connection)
                return
        if not data or len(rest) > _MAX_LINE_BYTES:
            self._drop(connection)
            if connection.rank is not None:
                self._on_lost(connection.rank, connection.status)

    def _read_line(self, connection: _Connection, line: bytes) -> bool:
        """Act on a line; return False if no more is to be read from this connection."""
        if connection.rank is None:
            return self._welcome(connection, line)
        kind, text = _parse(line)
        if kind == _HEARTBEAT:
            connection.status = text
        elif kind == _MESSAGE:
            message = self._store.verify(_MESSAGE_KEY, text.encode())
            if message is not None:
                self._send_all(line + b"\n", source=connection)
                self._on_message(message)
        return kind != _GOODBYE

    def _message_line(self, text: str) -> bytes:
        return _line(_MESSAGE, self._store.sign(_MESSAGE_KEY, text))

    def _listen(self) -> socket.socket | None:
        """Publish an address for the children to connect to."""
        try:
            host = _own_host(self._launch_info)
            server = socket.create_server((host, 0), family=_family(host))
        except OSError:
            self._store.set(self._key, "")  # so that the children don't wait for it
            return None
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ, partial(self._accept, server))
        self._store.set(self._key, f"{self._token} {server.getsockname()[1]} {host}")
        return server

    def _connect(self, parent: int) -> socket.socket:
        key = f"tree/{parent}"
        address = self._store.wait_for(key, timedelta(seconds=self._timeout)) or ""
        token, port, host = f"{address}  ".split(" ", 2)
        if not port.isdecimal():
            raise OSError(f"rank {parent} has no address that other nodes can reach")
        connection = socket.create_connection((host.strip(), int(port)), timeout=_CONNECT_SECONDS)
        rank = self._launch_info.rank
        connection.sendall(_line(str(rank), self._store.sign(f"{key}/{rank}", token)))
        return connection

    def _accept(self, server: socket.socket) -> None:
        with suppress(OSError):
            accepted, _ = server.accept()
            if sum(connection.rank is None for connection in self._connections) < _MAX_STRANGERS:
                self._add(accepted, None)
            else:
                accepted.close()

    def _welcome(self, connection: _Connection, line: bytes) -> bool:
        """Find out which child a new connection is from; return False if it is not from a child."""
        rank, proof = _parse(line)
        if not rank.isdecimal() or int(rank[:9]) not in self.missing_children:
            return False
        token = self._store.verify(f"{self._key}/{rank}", proof.encode())
        if token is None or not hmac.compare_digest(token.encode(), self._token.encode()):
            return False
        connection.rank = int(rank)
        self.missing_children.discard(connection.rank)
        if not self.missing_children:
            with suppress(RuntimeError):
                self._store.delete(self._key)
        return True

    def _add(self, connected: socket.socket, rank: int | None) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(connected, rank)
        self._connections.append(connection)
        self._selector.register(connected, selectors.EVENT_READ, partial(self._receive, connection))

    def _drop(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._selector.unregister(connection.socket)
            connection.socket.close()


def _line(kind: str, text: str = "") -> bytes:
    return json.dumps([kind, text]).encode() + b"\n"


def _parse(line: bytes) -> tuple[str, str]:
    """Return the kind and text of a line; two empty texts if it is damaged. Without a secret, anyone may send one."""
    try:
        kind, text = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return "", ""
    return (kind, text) if isinstance(kind, str) and isinstance(text, str) else ("", "")


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
