"""LauncherWatch: ends a rank whose launcher has ended, even if that was killed.

A launcher forwards signals to its ranks, and ends them when one fails. If it is killed (SIGKILL, out of memory), nobody
tells its ranks, which would train on without a restart, and in the way of the next launch. A process whose parent has
ended gets another parent on every system, so a thread compares `os.getppid()` with the launcher's number.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from stretto.base.errors import LostPeerError
from stretto.base.exit import exit_immediately
from stretto.mesh.launch_info import LaunchInfo

LAUNCHER_PID_VARIABLE = "STRETTO_LAUNCHER_PID"
"""Our own launchers set this to their process number; their ranks are watched from their first line on."""
_TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
_PERIOD_SECONDS = 0.5
# A single rank, or ranks that host their store, can still save; they have this long.
_SAVE_SECONDS = 60.0


@dataclass(frozen=True)
class Launcher:
    """The parent process of this rank: torchrun's agent, `stretto`, or the caller of `stretto.spawn`."""

    pid: int
    is_needed_to_save: bool = False  # it hosts the store through which several ranks agree on a save
    prints: bool = True  # this rank prints the message; one per node is enough

    @property
    def has_ended(self) -> bool:
        """Whether this process has another parent by now."""
        return os.getppid() != self.pid

    def block_if_ended(self) -> None:
        """Never return if the launcher has ended: its watch ends this process, and errors of this rank mislead."""
        while self.has_ended:
            time.sleep(_PERIOD_SECONDS)

    def block_if_store_is_lost(self, seconds: float = 0.0) -> None:
        """Never return if the launcher has ended and this rank needs it to save: further steps would be lost.

        Wait up to `seconds` for the launcher to end: its connections close before its ranks get another parent.
        """
        if self.is_needed_to_save:
            until = time.monotonic() + seconds
            while not self.has_ended and time.monotonic() < until:
                time.sleep(0.01)
            self.block_if_ended()


def find_launcher(variables: Mapping[str, str], launch_info: LaunchInfo | None) -> Launcher | None:
    """Return this rank's launcher; None for one that ends its ranks by itself (srun, mpirun), or without a launcher."""
    number = variables.get(LAUNCHER_PID_VARIABLE)
    if launch_info is None or (number is None and _TORCHRUN_VARIABLE not in variables):
        return None
    return Launcher(
        os.getppid() if number is None else int(number),
        is_needed_to_save=launch_info.has_agent_store and launch_info.size > 1,
        prints=launch_info.local_rank == 0,
    )


class LauncherWatch:
    """Runs the thread that ends this process after its launcher has ended."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def stop(self) -> None:
        """End the thread, soon."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(_PERIOD_SECONDS):
            if self._launcher.has_ended:
                self._end_process()

    def _end_process(self) -> None:
        can_save = not self._launcher.is_needed_to_save and callable(signal.getsignal(signal.SIGTERM))
        ending = "save and stop" if can_save else "stop"
        if self._launcher.prints:
            with suppress(OSError, ValueError):  # whoever read our output may be gone
                sys.stderr.write(
                    f"stretto: error: the launcher of this rank (process {self._launcher.pid}) has ended without its "
                    f"ranks, so they {ending}; start it again to resume from the last save\n"
                )
        if can_save:
            os.kill(os.getpid(), signal.SIGTERM)  # what a launcher forwards when it is preempted
            time.sleep(_SAVE_SECONDS)
        # Every rank notices before the first one ends: a rank would otherwise report that it has lost another.
        time.sleep(2 * _PERIOD_SECONDS)
        exit_immediately(LostPeerError.exit_code)


@contextmanager
def watch_launcher(launcher: Launcher | None) -> Iterator[None]:
    """Within this context, end this process if its launcher ends. Ranks of our own launchers are watched already."""
    if launcher is None or LAUNCHER_PID_VARIABLE in os.environ:
        yield
        return
    watch = LauncherWatch(launcher)
    try:
        yield
    finally:
        watch.stop()
