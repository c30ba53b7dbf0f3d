"""Watchdog: ends a rank whose main thread may wait forever for a lost rank.

With gloo, a connection to a lost rank breaks, and the call that uses it raises an error. With NCCL nothing raises: the
host waits for a kernel that never ends, and not even signal handlers run. So each rank has a thread that watches
whether a failure was reported, and how long the main thread has been waiting for other ranks.

If there is a reason to give up, the thread prints it, aborts the process groups, and ends the process.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from stretto.base.errors import SHARED_ERRORS, StrettoError
from stretto.mesh.c10d import abort_process_groups
from stretto.mesh.strict import is_strict
from stretto.mesh.timeouts import call_with_timeout

_PERIOD_SECONDS = 0.25
_ABORT_SECONDS = 2.0


class Watchdog:
    """Runs the thread that ends this rank if it waits for a lost rank, or after an error on another rank.

    `find_error` is called a few times per second; it returns the error that ends this rank, or None.
    """

    def __init__(self, find_error: Callable[[], StrettoError | None]) -> None:
        self.find_error = find_error
        self._stopped = threading.Event()
        self._is_ending = False
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join(_PERIOD_SECONDS)

    def block_if_ending(self) -> None:
        """Don't return if operations were aborted, as their results are not valid: wait for the end."""
        while self._is_ending:
            time.sleep(_PERIOD_SECONDS)

    def _watch(self) -> None:
        while not self._stopped.wait(_PERIOD_SECONDS):
            error = self.find_error()
            if error is None or self._stopped.is_set():
                continue
            self._is_ending = True
            _exit(error)


def _exit(error: StrettoError) -> None:
    """Print an error, abort the process groups and end this process, whatever its main thread waits for."""
    try:
        with suppress(OSError, ValueError):  # whoever read our output may be gone
            if not isinstance(error, SHARED_ERRORS):  # the rank where the error occurred prints those
                sys.stderr.write(f"stretto: error: {error}\n")
            sys.stdout.flush()
            sys.stderr.flush()
        if not is_strict():  # that is in this process, and ends with it
            _abort()
    finally:
        os._exit(error.exit_code)


def _abort() -> None:
    """End NCCL's kernels, so that the GPU is free; an abort may itself wait for something, so it has a time limit."""
    with suppress(Exception):
        call_with_timeout(_ABORT_SECONDS, abort_process_groups)
