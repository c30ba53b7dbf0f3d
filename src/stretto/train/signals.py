"""Signals: a machine that will be taken away says so; the run saves and leaves."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# Kubernetes, spot machines and Slurm at its end; Slurm ahead of its end, with --signal=USR1@120.
_PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def on_preemption_signal(call: Callable[[], None]) -> Iterator[None]:
    """Call a function when the process is asked to leave, as long as the context lasts; it must do very little."""

    def handle(number: int, frame: FrameType | None) -> None:
        call()

    # Only there can Python be told; elsewhere the signals keep the meaning they have.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in _PREEMPTION_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
