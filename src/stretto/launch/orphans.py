"""Orphans: ranks don't outlive whoever started them, however it ends."""

import ctypes
import os
import signal
import sys

from stretto.base.errors import LostPeerError

LAUNCHER = "STRETTO_LAUNCHER"
# From Linux's <sys/prctl.h>: the signal to get when the parent has died.
_PR_SET_PDEATHSIG = 1


# How ranks tell their launcher that they were asked to leave, and so are not lost.
LEFT = 85


def exit_code_of_leaving() -> int:
    """Return the code with which this rank leaves when it is asked to."""
    return LEFT if LAUNCHER in os.environ else LostPeerError.exit_code


def leave_with_launcher() -> None:
    """Ask the system to tell this rank to leave when its launcher has died; on Linux only."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(launcher):
        # It has died in the meantime: nobody is left to tell us.
        sys.exit(LostPeerError.exit_code)
