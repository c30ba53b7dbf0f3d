"""Preemption signals, with which a scheduler announces that it will stop the process."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# SIGTERM from Kubernetes, spot instances and Slurm; SIGUSR1 from Slurm 120 s earlier, with --signal=USR1@120.
PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def on_preemption_signal(callback: Callable[[], None]) -> Iterator[None]:
    """Within this context, call `callback` on a preemption signal. It runs in a signal handler, so keep it short."""
    # Python allows signal handlers in the main thread only; elsewhere, signals are left alone.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old_handlers = {number: signal.signal(number, lambda *_: callback()) for number in PREEMPTION_SIGNALS}
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
