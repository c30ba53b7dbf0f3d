"""handle_signals: handlers of signals within a context."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def handle_signals(handlers: Mapping[signal.Signals, Callable[[int, object], object]]) -> Iterator[None]:
    """Within this context, call these handlers, with a signal's number and a frame; then restore the former ones.

    Python allows handlers in the main thread only. In other threads, signals are left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in former.items():
            # None: it was not set by Python code, so Python can't set it again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
