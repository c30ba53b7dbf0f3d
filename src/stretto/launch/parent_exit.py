"""Ranks end with the launcher that started them, however it ends."""

import ctypes
import os
import signal
import sys

from stretto.base.errors import LostPeerError

LAUNCHER_PID_VARIABLE = "STRETTO_LAUNCHER_PID"
# From Linux's <sys/prctl.h>: the signal to get when the parent dies.
_PR_SET_PDEATHSIG = 1
# With this code a rank tells its launcher that it was preempted, not lost.
PREEMPTED_EXIT_CODE = 85


def preempted_exit_code() -> int:
    """Return the exit code of a rank that was preempted."""
    return PREEMPTED_EXIT_CODE if LAUNCHER_PID_VARIABLE in os.environ else LostPeerError.exit_code


def exit_with_launcher() -> None:
    """Let the system send SIGTERM to this rank when its launcher dies; on Linux only."""
    launcher = os.environ.get(LAUNCHER_PID_VARIABLE)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(launcher):
        # It died before the call above, so no signal will come.
        sys.exit(LostPeerError.exit_code)
