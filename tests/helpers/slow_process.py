"""slow_down: lets a process run for a part of the time only."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def slow_down(pid: int) -> Iterator[None]:
    """Let a process run for only a fifth of the time, as on a core that others use too."""
    has_ended = threading.Event()

    def stop_and_continue() -> None:
        with suppress(ProcessLookupError):
            while not has_ended.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.08)
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.02)

    thread = threading.Thread(target=stop_and_continue)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
