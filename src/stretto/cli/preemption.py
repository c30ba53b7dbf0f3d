"""What a preemption signal does to a command, from its start; torch is not imported here."""

import os
from contextlib import AbstractContextManager, suppress

from stretto.base.exit import exit_immediately
from stretto.launch.parent_exit import preempted_exit_code
from stretto.mesh.launch_info import find_launch_info
from stretto.train.signals import on_preemption_signal


def exit_on_preemption(message: str = "") -> AbstractContextManager[None]:
    """Return a context where a preemption signal ends the process at once; `Run.events` overrides it to save first.

    Without a launcher, and on rank 0, `message` is printed before that.
    """
    # Not in the handler: a launcher sets the variables that this reads, for its ranks, in its own environment too.
    exit_code, launch_info = preempted_exit_code(), find_launch_info(os.environ) if message else None
    line = f"stretto: {message}\n" if message and (launch_info is None or launch_info.rank == 0) else ""

    def exit_with_message() -> None:
        # Not print: the handler may interrupt another write to stderr.
        with suppress(OSError):
            os.write(2, line.encode())
        exit_immediately(exit_code)

    return on_preemption_signal(exit_with_message)
