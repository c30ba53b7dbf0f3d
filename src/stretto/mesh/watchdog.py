"""Watchdog: ends a rank whose main thread may wait forever for a lost rank.

With gloo, a connection to a lost rank breaks, and the call that uses it raises an error. With NCCL nothing raises: the
host waits for a kernel that never ends, and not even signal handlers run. So each rank has a thread that watches:

- the next rank, through a gloo connection of their own. The rank sends a heartbeat every second; if its process dies,
  the connection breaks at once, and if its node or its network is down, no heartbeat arrives.

      rank 0 ──heartbeat──► rank 3 ──heartbeat──► rank 2 ──heartbeat──► rank 1 ──heartbeat──► rank 0

- the store, where any rank can publish which rank is lost, or the error that ends the run
- how long the main thread has been waiting for other ranks

If there is a reason to give up, the thread prints it, aborts the process groups and ends the process.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch

from stretto.base.errors import SHARED_ERRORS, StrettoError
from stretto.mesh.c10d import PrefixStore, Store, abort_process_groups, open_gloo
from stretto.mesh.timeouts import call_with_timeout

_PERIOD_SECONDS = 1.0
_MAX_READS_PER_SECOND = 1000  # of the store, by all ranks together
_ABORT_SECONDS = 2.0
_CONNECT_TIMEOUT = timedelta(seconds=60)
_FOREVER = timedelta(days=365)


class Heartbeats:
    """Sends heartbeats to the previous rank and receives those of the next one, over gloo."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self.next_rank = (rank + 1) % size
        self._timeout = timeout.total_seconds()
        # Even ranks connect to the next rank first, so that the ranks don't connect one after another.
        links = {}
        for first in (rank, (rank - 1) % size) if rank % 2 == 0 else ((rank - 1) % size, rank):
            link_store = PrefixStore(f"heartbeats/{first}", store)
            links[first] = open_gloo(link_store, int(first != rank), 2, _CONNECT_TIMEOUT)
        self._from_next, self._to_previous = links[rank], links[(rank - 1) % size]
        self._last_heard = time.monotonic()
        self._is_connected, self._has_said_goodbye = True, False
        self._stopped = threading.Event()
        # Threads of their own: both wait for as long as the other rank makes them wait.
        self._sender = threading.Thread(target=self._send, daemon=True)
        self._sender.start()
        threading.Thread(target=self._listen, daemon=True).start()

    def stop(self) -> None:
        """Say goodbye to the previous rank, which then no longer expects heartbeats."""
        self._stopped.set()
        self._sender.join(_PERIOD_SECONDS)

    def is_next_rank_lost(self) -> bool:
        """Return whether the next rank's process is gone, or has been silent for too long."""
        is_silent = time.monotonic() - self._last_heard > self._timeout
        return not self._has_said_goodbye and (is_silent or not self._is_connected)

    def _send(self) -> None:
        with suppress(RuntimeError):  # the previous rank is lost; the rank before it finds out
            while not self._stopped.wait(_PERIOD_SECONDS):
                self._to_previous.send([torch.ones(1)], 0, 0).wait(_FOREVER)
            self._to_previous.send([torch.zeros(1)], 0, 0).wait(_FOREVER)

    def _listen(self) -> None:
        heartbeat = torch.ones(1)
        try:
            while not self._has_said_goodbye:
                self._from_next.recv([heartbeat], 1, 0).wait(_FOREVER)
                self._last_heard = time.monotonic()
                self._has_said_goodbye = not bool(heartbeat)
        except RuntimeError:
            self._is_connected = False


class Watchdog:
    """Runs the thread that ends this rank if it waits for a lost rank, or after an error on another rank.

    `find_error` is called about once per second, with the number of the next rank if that is lost, else None; it
    returns the error that ends this rank, or None. Without `heartbeats`, a lost rank is found only when the main thread
    has waited too long.
    """

    def __init__(
        self, heartbeats: Heartbeats | None, size: int, find_error: Callable[[int | None], StrettoError | None]
    ) -> None:
        self.find_error = find_error
        self._heartbeats = heartbeats
        self._read_period = max(_PERIOD_SECONDS, size / _MAX_READS_PER_SECOND)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the previous rank no longer expects heartbeats."""
        self._stopped.set()
        self._thread.join(_PERIOD_SECONDS)
        if self._heartbeats is not None:
            self._heartbeats.stop()

    def _watch(self) -> None:
        next_read = 0.0
        while not self._stopped.wait(_PERIOD_SECONDS):
            heartbeats = self._heartbeats
            lost = heartbeats.next_rank if heartbeats is not None and heartbeats.is_next_rank_lost() else None
            if lost is None and time.monotonic() < next_read:
                continue
            next_read = time.monotonic() + self._read_period
            error = self.find_error(lost)
            if error is not None and not self._stopped.is_set():
                _exit(error)


def _exit(error: StrettoError) -> None:
    """Print an error, abort the process groups and end this process, whatever its main thread waits for."""
    if not isinstance(error, SHARED_ERRORS):  # the rank where the error occurred prints those
        sys.stderr.write(f"stretto: error: {error}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    # NCCL's kernels end, so that the GPU is free; an abort may itself wait for something, so it has a time limit.
    with suppress(Exception):
        call_with_timeout(_ABORT_SECONDS, abort_process_groups)
    os._exit(error.exit_code)
