"""Preemption signals: the scheduler announces that it will take the machine away."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# SIGTERM from Kubernetes, spot instances and Slurm; SIGUSR1 from Slurm ahead of time, with --signal=USR1@120.
_PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def on_preemption_signal(call: Callable[[], None]) -> Iterator[None]:
    """Call a function on a preemption signal, for as long as the context lasts; it must do very little."""

    def handle(number: int, frame: FrameType | None) -> None:
        call()

    # Python allows signal handlers in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in _PREEMPTION_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
