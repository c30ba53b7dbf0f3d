"""What a preemption signal does to a command, from its start; torch is not imported here."""

import os
import sys
from contextlib import AbstractContextManager, suppress
from typing import NoReturn

from stretto.launch.parent_exit import preempted_exit_code
from stretto.train.signals import on_preemption_signal


def exit_on_preemption() -> AbstractContextManager[None]:
    """Return a context where a preemption signal ends the process at once; `Run.events` overrides it to save first."""
    # Not in the handler: a launcher sets the variable that this reads, for its ranks, in its own environment too.
    exit_code = preempted_exit_code()
    return on_preemption_signal(lambda: exit_immediately(exit_code))


def exit_immediately(exit_code: int) -> NoReturn:
    """End this process at once, so that other ranks see its connections close."""
    for stream in (sys.stdout, sys.stderr):
        # A signal handler may interrupt a write to the same stream (RuntimeError), whose reader may be gone (OSError).
        with suppress(RuntimeError, OSError):
            stream.flush()
    os._exit(exit_code)
