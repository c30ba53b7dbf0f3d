"""Calls and polls with a time limit: over an interrupted network a call may never return, not even with an error."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from stretto.base.jitter import jitter

Result = TypeVar("Result")


class OperationTimeoutError(RuntimeError):
    """A call did not return in time."""


def call_with_timeout(seconds: float, call: Callable[[], Result]) -> Result:
    """Return the result of `call`, or raise its error. After `seconds`, abandon it and raise OperationTimeoutError."""
    results: list[Result] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001 - raised below, on the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise OperationTimeoutError(f"no answer within {seconds:.0f} s")
    return results[0]


def poll(condition: Callable[[], bool], seconds: float, max_pause: float = 0.05) -> bool:
    """Call `condition` until it is true; return False after `seconds`.

    Pauses grow from about 0.01 s to about `max_pause`; they are random, because all ranks may poll the same store.
    """
    pause, deadline = 0.01, time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(jitter(pause))
        pause = min(2 * pause, max_pause)
    return True
