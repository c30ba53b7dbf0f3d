"""Within: an answer in time or none at all. Where a network is cut nothing comes back, not even an error."""

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class OperationTimeoutError(RuntimeError):
    """There was no answer in time."""


def call_with_timeout(seconds: float, call: Callable[[], Result]) -> Result:
    """Return what a call returns, or raise what it raises, if that takes no longer than so many seconds."""
    answers: list[Result] = []
    errors: list[RuntimeError] = []

    def run() -> None:
        try:
            answers.append(call())
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise OperationTimeoutError(f"no answer within {seconds:.0f} s")
    return answers[0]
