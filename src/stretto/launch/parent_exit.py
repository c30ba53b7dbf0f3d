"""Ends a rank when its launcher ends, even if that was killed, and defines the exit code of a preempted rank."""

import ctypes
import os
import signal
import sys

from stretto.base.errors import LostPeerError

LAUNCHER_PID_VARIABLE = "STRETTO_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1  # from Linux's <sys/prctl.h>: set the signal that this process receives when its parent dies
# A preempted rank exits with this otherwise unused code, so that its launcher does not treat it as lost.
PREEMPTED_EXIT_CODE = 85


def preempted_exit_code() -> int:
    """Return a preempted rank's exit code: PREEMPTED_EXIT_CODE for stretto's launcher, LostPeerError's for others."""
    return PREEMPTED_EXIT_CODE if LAUNCHER_PID_VARIABLE in os.environ else LostPeerError.exit_code


def exit_when_launcher_dies() -> None:
    """Ask Linux to send SIGTERM to this rank when stretto's launcher dies; do nothing on other systems."""
    launcher = os.environ.get(LAUNCHER_PID_VARIABLE)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(launcher):
        # The launcher died before the call above, so no signal will come.
        sys.exit(LostPeerError.exit_code)
