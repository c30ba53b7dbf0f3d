"""Orphans: ranks don't outlive whoever started them, however it ends."""

import ctypes
import os
import signal
import sys

from stretto.base.errors import LostPeerError

LAUNCHER_PID_VARIABLE = "STRETTO_LAUNCHER_PID"
# From Linux's <sys/prctl.h>: the signal to get when the parent has died.
_PR_SET_PDEATHSIG = 1


# How ranks tell their launcher that they were asked to leave, and so are not lost.
PREEMPTED_EXIT_CODE = 85


def preempted_exit_code() -> int:
    """Return the code with which this rank leaves when it is asked to."""
    return PREEMPTED_EXIT_CODE if LAUNCHER_PID_VARIABLE in os.environ else LostPeerError.exit_code


def exit_with_launcher() -> None:
    """Ask the system to tell this rank to leave when its launcher has died; on Linux only."""
    launcher = os.environ.get(LAUNCHER_PID_VARIABLE)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(launcher):
        # It has died in the meantime: nobody is left to tell us.
        sys.exit(LostPeerError.exit_code)
