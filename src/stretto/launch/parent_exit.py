"""Ends a rank when its launcher ends, even if that was killed, and defines the exit code of a preempted rank."""

import os
import sys

from stretto.base.errors import LostPeerError
from stretto.mesh.launch_info import find_launch_info
from stretto.mesh.launcher_watch import LAUNCHER_PID_VARIABLE, LauncherWatch, find_launcher

# A preempted rank exits with this otherwise unused code, so that its launcher does not treat it as lost.
PREEMPTED_EXIT_CODE = 85


def preempted_exit_code() -> int:
    """Return a preempted rank's exit code: PREEMPTED_EXIT_CODE for stretto's launcher, LostPeerError's for others."""
    return PREEMPTED_EXIT_CODE if LAUNCHER_PID_VARIABLE in os.environ else LostPeerError.exit_code


def exit_when_launcher_dies() -> None:
    """End this rank when stretto's launcher dies, from now on; torchrun's is watched in `world`."""
    if LAUNCHER_PID_VARIABLE not in os.environ:
        return
    launcher = find_launcher(os.environ, find_launch_info(os.environ))
    if launcher is None:
        return
    if launcher.has_ended:
        sys.exit(LostPeerError.exit_code)
    LauncherWatch(launcher)
