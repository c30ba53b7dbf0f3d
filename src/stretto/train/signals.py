"""Signals that ask a run to stop: a scheduler's preemption signals, and Ctrl-C."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from stretto.base.signal_handlers import handle_signals

# SIGTERM from Kubernetes, spot instances and Slurm; SIGUSR1 from Slurm 120 s earlier, with --signal=USR1@120.
PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# One Ctrl-C may arrive twice: from the terminal, and from a launcher that forwards it. Later ones are another.
SAME_PRESS_SECONDS = 1.0


def on_preemption_signal(callback: Callable[[], None]) -> AbstractContextManager[None]:
    """Within this context, call `callback` on a preemption signal. It runs in a signal handler, so keep it short."""
    return handle_signals(dict.fromkeys(PREEMPTION_SIGNALS, lambda *_: callback()))


def on_second_interrupt(callback: Callable[[], None]) -> AbstractContextManager[None]:
    """Within this context, which begins after a first Ctrl-C or another signal, call `callback` at the next Ctrl-C."""
    started = time.monotonic()

    def handle(*_: object) -> None:
        if time.monotonic() - started > SAME_PRESS_SECONDS:
            callback()

    return handle_signals({signal.SIGINT: handle})


@contextmanager
def on_interrupt(callback: Callable[[], None]) -> Iterator[None]:
    """Within this context, call `callback` at the first Ctrl-C (SIGINT); a second one raises KeyboardInterrupt.

    The callback runs in a signal handler, so keep it short. Nothing changes where SIGINT is ignored.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background jobs
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

    with handle_signals({signal.SIGINT: handle}):
        yield
