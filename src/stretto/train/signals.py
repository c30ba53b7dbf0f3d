"""Signals that ask a run to stop: a scheduler's preemption signals, and Ctrl-C."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# SIGTERM from Kubernetes, spot instances and Slurm; SIGUSR1 from Slurm 120 s earlier, with --signal=USR1@120.
PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# One Ctrl-C may arrive twice: from the terminal, and from a launcher that forwards it. Later ones are another.
SAME_PRESS_SECONDS = 1.0


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


@contextmanager
def on_interrupt(callback: Callable[[], None]) -> Iterator[None]:
    """Within this context, call `callback` at the first Ctrl-C (SIGINT); a second one raises KeyboardInterrupt.

    The callback runs in a signal handler, so keep it short. Nothing changes where SIGINT is ignored.
    """
    is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # as in a shell's background jobs
    if is_ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    first_time: float | None = None

    def handle(*_: object) -> None:
        nonlocal first_time
        if first_time is None:
            first_time = time.monotonic()
            callback()
        elif time.monotonic() - first_time > SAME_PRESS_SECONDS:
            raise KeyboardInterrupt

    old_handler = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old_handler)
