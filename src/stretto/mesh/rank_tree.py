"""RankTree: each rank has a TCP connection to its parent and to its children, and hears from them every second.

                    rank 0
        ┌──────────┬──┴───────┬─── ... ──┐
      rank 1     rank 2     rank 3     rank 8         the parent of rank r is rank (r - 1) // 8
     ┌──┴ ... ─┐
   rank 9   rank 16

If a process dies, its connections break at once; if its node or network is down, no heartbeat arrives. So its parent
and its children know which rank is lost. A message that each rank passes on to its other neighbors reaches 4,096 ranks
in at most eight hops, and no rank sends more than nine. A rank that ends as planned says goodbye first.

The thread waits in Python's sockets: waiting in torch's C++, it would abort a process that ends meanwhile.
"""

import hmac
import ipaddress
import json
import logging
import re
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

from stretto.base.reason import class_and_reason, short_reason
from stretto.mesh.launch_info import LaunchInfo
from stretto.mesh.rank_store import RankStore
from stretto.mesh.signed_store import SignedStore

_log = logging.getLogger(__name__)
_FANOUT = 8
_PERIOD_SECONDS = 1.0
_MIN_SILENT_PERIODS = 5  # a rank that sends no heartbeat for so long may be lost
_CONNECT_SECONDS = 30.0
_FLUSH_SECONDS = 1.0
_MAX_BUFFER_BYTES = 1 << 20  # of an incomplete line, and of what another rank has not yet read
# Limits of a connection that has not shown yet that it is from a child.
_MAX_UNKNOWN, _UNKNOWN_SECONDS, _MAX_UNKNOWN_BYTES = 64, 5.0, 4096
_RANK = re.compile("[0-9]{1,9}")
_HEARTBEAT, _MESSAGE, _GOODBYE = "heartbeat", "message", "goodbye"
_MESSAGE_KEY = "tree"  # what the signatures of messages are for
_NO_ADDRESS = "none"
# A documentation address, which no network has: looking up the way to it sends nothing.
_ANY_OTHER_ADDRESS = "192.0.2.1"


@dataclass(eq=False)
class _Connection:
    socket: socket.socket
    rank: int | None  # at the other end; None until it has shown that it is a child
    received: bytearray = field(default_factory=bytearray)  # an incomplete line
    unsent: bytearray = field(default_factory=bytearray)  # what the other rank's system has not accepted yet
    last_heard: float = field(default_factory=time.monotonic)
    status: str | None = None  # from the last heartbeat; None before the first


class RankTree:
    """Exchanges heartbeats and messages with the parent and the children of this rank. Every rank must create it.

    Its thread calls `on_message` with each text that a neighbor has sent and the neighbor's rank; `on_lost` with a rank
    whose process is gone, or that has been silent for `max_silence` seconds, and its last status; and `on_cut_off` if
    some ranks can't be reached, or no longer, through the tree. `connect_error` says why this rank can't connect to its
    parent; None if it can.
    """

    def __init__(
        self,
        store: SignedStore,
        launch_info: LaunchInfo,
        timeout: timedelta,
        status: Callable[[], str],
        on_message: Callable[[str, int], None],
        on_lost: Callable[[int, str | None], None],
        on_cut_off: Callable[[], None],
    ) -> None:
        rank = launch_info.rank
        self.parent = None if rank == 0 else (rank - 1) // _FANOUT
        # Those that have not connected yet. The thread replaces the set, so that others can read it.
        self.missing_children = frozenset(range(rank * _FANOUT + 1, min((rank + 1) * _FANOUT + 1, launch_info.size)))
        self.connect_error: str | None = None
        self._signer, self._store, self._launch_info = store, RankStore(store), launch_info
        self._connect_seconds = min(_CONNECT_SECONDS, timeout.total_seconds())
        self.max_silence = max(timeout.total_seconds(), _MIN_SILENT_PERIODS * _PERIOD_SECONDS)
        self._status, self._on_message, self._on_lost, self._on_cut_off = status, on_message, on_lost, on_cut_off
        self._key = f"tree/{rank}"
        self._has_children = bool(self.missing_children)
        self._token = secrets.token_hex(16)  # shows that a connection is meant for this rank of this launch
        self._connections: list[_Connection] = []
        self._outbox: deque[tuple[str, threading.Event]] = deque()  # messages of other threads
        self._newest_message = b""  # for children that connect later
        self._is_stopped = self._says_goodbye = False
        self._selector = selectors.DefaultSelector()
        self._wake_up, self._wake_up_receiver = socket.socketpair()
        self._register(self._wake_up_receiver, lambda _: self._wake_up_receiver.recv(64))
        self._server = self._listen() if self.missing_children else None
        self._children_deadline = time.monotonic() + 2 * self._connect_seconds
        if self.parent is not None:
            try:
                self._add(self._connect(self.parent), self.parent)
            except (OSError, RuntimeError) as error:
                self.connect_error = short_reason(error)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def send(self, text: str, source: int | None = None) -> None:
        """Send a message to all neighbors, except the one that it is from; return when it has left this rank."""
        if threading.current_thread() is self._thread:
            self._send_all(self._message_line(text), source)
            return
        is_sent = threading.Event()
        self._outbox.append((text, is_sent))
        self._wake()
        is_sent.wait(_FLUSH_SECONDS)

    def expect_heartbeats(self) -> None:
        """From now on, report a neighbor as lost if a few heartbeats have not come, rather than after the timeout."""
        self.max_silence = _MIN_SILENT_PERIODS * _PERIOD_SECONDS

    def publish_connect_error(self) -> None:
        """Tell the parent that this rank runs, although it is not connected to it."""
        if self.connect_error is not None:
            self._store.set(_unconnected_key(self._launch_info.rank), "yes")

    def find_ended_child(self) -> int | None:
        """Return a child that has not connected although it could: it ended before. None if there is none."""
        ended = (rank for rank in sorted(self.missing_children) if self._store.get(_unconnected_key(rank)) is None)
        return next(ended, None)

    def delete_keys(self) -> None:
        """Delete this rank's keys in the store, when all ranks have created their tree."""
        if self._has_children:
            with suppress(RuntimeError):
                self._store.delete(self._key)

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
        try:
            self._exchange()
        except Exception as error:  # noqa: BLE001 - the run goes on: this rank learns of failures from the store
            _log.exception("rank %d no longer watches other ranks", self._launch_info.rank)
            self.connect_error = class_and_reason(error)
            self._on_cut_off()
        finally:
            for connection in list(self._connections):
                self._drop(connection)
            self._selector.close()
            for own_socket in (self._server, self._wake_up, self._wake_up_receiver):
                if own_socket is not None:
                    own_socket.close()

    def _exchange(self) -> None:
        if self.connect_error is not None:
            self._on_cut_off()
        next_heartbeat = 0.0
        while not self._is_stopped:
            for key, events in self._selector.select(max(0.0, next_heartbeat - time.monotonic())):
                key.data(events)
            while self._outbox:
                text, is_sent = self._outbox.popleft()
                self._send_all(self._message_line(text))
                is_sent.set()
            now = time.monotonic()
            if now >= next_heartbeat:
                if 0 < next_heartbeat < now - self.max_silence / 2:
                    # It was this process that was frozen, and nobody could be heard.
                    for connection in self._connections:
                        connection.last_heard = now
                for connection in list(self._connections):
                    self._send_heartbeat(connection)
                self._find_silent_ranks(now)
                self._accept_again(now)
                next_heartbeat = now + _PERIOD_SECONDS
        for connection in self._connections:
            if self._says_goodbye and connection.rank is not None:
                connection.unsent += _line(_GOODBYE)
            with suppress(OSError):
                connection.socket.settimeout(_FLUSH_SECONDS / 4)
                connection.socket.sendall(connection.unsent)
                # Closing a connection with data that was not read would discard what was sent.
                connection.socket.shutdown(socket.SHUT_WR)
                connection.socket.setblocking(False)
                while connection.socket.recv(1 << 16):
                    pass

    def _find_silent_ranks(self, now: float) -> None:
        for connection in list(self._connections):
            silence = now - connection.last_heard
            if connection.rank is None:
                if silence > _UNKNOWN_SECONDS:
                    self._drop(connection)
            elif silence > self.max_silence:
                self._on_lost(connection.rank, connection.status)  # it may hear of it later, so it stays connected
                connection.last_heard = now

    def _send_all(self, line: bytes, source: int | None = None) -> None:
        self._newest_message = line
        for connection in list(self._connections):
            if connection.rank is not None and connection.rank != source:
                self._send(connection, line)

    def _send_heartbeat(self, connection: _Connection) -> None:
        if connection.rank is not None and not connection.unsent:  # later ones say more
            self._send(connection, _line(_HEARTBEAT, self._status()))

    def _send(self, connection: _Connection, line: bytes) -> None:
        connection.unsent += line
        self._flush(connection)
        if len(connection.unsent) > _MAX_BUFFER_BYTES:
            self._lose(connection)

    def _flush(self, connection: _Connection) -> None:
        """Send as much as the other rank accepts now, and the rest when it accepts more."""
        with suppress(OSError):  # `_receive` finds out if the connection is broken
            del connection.unsent[: connection.socket.send(connection.unsent)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._selector.modify(connection.socket, events, self._selector.get_key(connection.socket).data)

    def _on_event(self, connection: _Connection, events: int) -> None:
        if connection in self._connections and events & selectors.EVENT_WRITE:
            self._flush(connection)
        if connection in self._connections and events & selectors.EVENT_READ:
            self._receive(connection)

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        connection.received += data
        if connection.rank is not None:
            connection.last_heard = time.monotonic()
        *lines, rest = bytes(connection.received).split(b"\n")
        connection.received = bytearray(rest)
        for line in lines:
            if not self._read_line(connection, line):
                self._drop(connection)
                return
        if not data or len(rest) > (_MAX_UNKNOWN_BYTES if connection.rank is None else _MAX_BUFFER_BYTES):
            self._lose(connection)

    def _read_line(self, connection: _Connection, line: bytes) -> bool:
        """Act on a line; return False if no more is to be read from this connection."""
        if connection.rank is None:
            return self._welcome(connection, line)
        kind, text = _parse(line)
        if kind == _HEARTBEAT:
            connection.status = text
        elif kind == _MESSAGE:
            message = self._signer.verify(_MESSAGE_KEY, text.encode())
            if message is not None:
                self._on_message(message, connection.rank)
        elif kind == _GOODBYE:
            self._on_cut_off()  # from the ranks behind it, which may still run
        return kind != _GOODBYE

    def _lose(self, connection: _Connection) -> None:
        """Drop a connection that is broken; report its rank as lost if it was connected."""
        self._drop(connection)
        if connection.rank is None:
            return
        if connection.rank == self.parent and connection.status is None:
            self.connect_error = f"rank {self.parent} closed the connection"
            self._on_cut_off()
        else:
            self._on_lost(connection.rank, connection.status)

    def _message_line(self, text: str) -> bytes:
        return _line(_MESSAGE, self._signer.sign(_MESSAGE_KEY, text))

    def _listen(self) -> socket.socket | None:
        """Publish an address for the children to connect to."""
        try:
            host = _own_host(self._launch_info)
            server = socket.create_server((host, 0), family=_family(host))
        except OSError:
            self._store.set(self._key, _NO_ADDRESS)  # so that the children don't wait for it
            return None
        server.setblocking(False)
        self._register(server, lambda _: self._accept(server))
        self._store.set(self._key, f"{self._token} {server.getsockname()[1]} {host}")
        return server

    def _connect(self, parent: int) -> socket.socket:
        key = f"tree/{parent}"
        if not self._store.wait_for_keys([key], self._connect_seconds):
            raise OSError(f"rank {parent} published no address within {self._connect_seconds:.0f} s")
        token, port, host = f"{self._store.get(key) or _NO_ADDRESS}  ".split(" ", 2)
        if not port.isdecimal():
            raise OSError(f"rank {parent} has no address that other nodes can reach")
        connection = socket.create_connection((host.strip(), int(port)), timeout=self._connect_seconds)
        rank = self._launch_info.rank
        connection.sendall(_line(str(rank), self._signer.sign(f"{key}/{rank}", token)))
        return connection

    def _accept(self, server: socket.socket) -> None:
        if server is not self._server:
            return  # it was closed
        try:
            accepted, _ = server.accept()
        except BlockingIOError:
            return
        except OSError:
            self._selector.unregister(server)  # too many open files, for example; until the next heartbeat
            return
        if sum(connection.rank is None for connection in self._connections) < _MAX_UNKNOWN:
            self._add(accepted, None)
        else:
            accepted.close()

    def _accept_again(self, now: float) -> None:
        server = self._server
        if server is not None and server not in self._selector.get_map():
            self._register(server, lambda _: self._accept(server))
        if self.missing_children and now > self._children_deadline:
            self._children_deadline = float("inf")
            self._on_cut_off()

    def _welcome(self, connection: _Connection, line: bytes) -> bool:
        """Find out which child a new connection is from; return False if it is not from a child."""
        rank, proof = _parse(line)
        if not _RANK.fullmatch(rank) or int(rank) not in self.missing_children:
            return False
        token = self._signer.verify(f"{self._key}/{int(rank)}", proof.encode())
        if token is None or not hmac.compare_digest(token.encode(), self._token.encode()):
            return False
        connection.rank, connection.last_heard = int(rank), time.monotonic()
        still_missing = self.missing_children - {connection.rank}
        if not still_missing and self._server is not None:
            with suppress(KeyError):
                self._selector.unregister(self._server)
            self._server.close()
            self._server = None
        self.missing_children = still_missing  # when it is empty, nobody else can connect
        self._send_heartbeat(connection)  # shows the child that it is connected
        if self._newest_message:
            self._send(connection, self._newest_message)
        return True

    def _add(self, connected: socket.socket, rank: int | None) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(connected, rank)
        self._connections.append(connection)
        self._register(connected, partial(self._on_event, connection))

    def _register(self, own_socket: socket.socket, on_event: Callable[[int], object]) -> None:
        self._selector.register(own_socket, selectors.EVENT_READ, on_event)

    def _drop(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._selector.unregister(connection.socket)
            connection.socket.close()


def _unconnected_key(rank: int) -> str:
    return f"tree/{rank}/unconnected"


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
    """Return the address of this node at which the other nodes reach it: the one on the way to rank 0's node.

    On that node, the name of the address may be that of loopback. Then it is the one on the way to other networks.
    """
    if launch_info.local_size == launch_info.size:
        return "127.0.0.1"
    for address in (launch_info.address, _ANY_OTHER_ADDRESS):
        family, _, _, _, target = socket.getaddrinfo(address, launch_info.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            host = str(probe.getsockname()[0])
        if not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            return host
    raise OSError(f"{launch_info.address} is a loopback address on this node")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
