"""NoticeWatch: runs a command again and again, until it says that this machine will be taken away soon.

Clouds announce the end of a spot machine (two minutes before on AWS, half a minute on Google Cloud and Azure) at an
address that only the machine itself can read. What to ask differs by cloud, so it is a command of the user's.
"""

import logging
import os
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Self

from stretto.base.errors import ConfigError
from stretto.base.redact import without_secrets
from stretto.config.run import RunSettings
from stretto.mesh.world import World

# A command that takes longer is killed, and counts as "no notice".
_COMMAND_SECONDS = 10.0

_log = logging.getLogger(__name__)


class NoticeWatch:
    """Within this context, run `command` every `seconds` on a thread; when it exits with 0, call `callback`, once.

    The command is not run by a shell. It gets no input, and what it prints is discarded.
    """

    def __init__(self, command: str, callback: Callable[[], None], *, seconds: float = 5.0) -> None:
        try:
            self._arguments = shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"notice_command={command!r} can't be split into words ({error}); fix it") from None
        if not self._arguments or shutil.which(self._arguments[0]) is None:
            raise ConfigError(f"notice_command={command!r} is not a program that can be run; fix its path")
        self._command, self._callback, self._seconds = without_secrets(command), callback, seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._callback = lambda: None  # the thread may still wait for the command, and must not keep a run in memory

    def _watch(self) -> None:
        has_warned = False
        while not self._stopped.is_set():
            error = ""
            try:
                if self._has_notice():
                    _log.warning("this machine will be taken away soon, says %s", self._command)
                    self._callback()
                    return
            except subprocess.TimeoutExpired:
                error = f"it took longer than {_COMMAND_SECONDS:g} s"
            except OSError as os_error:
                error = str(os_error)
            if error and not has_warned:
                has_warned = True
                _log.warning("notice_command=%r has failed (%s), and is tried again", self._command, error)
            self._stopped.wait(self._seconds)

    def _has_notice(self) -> bool:
        result = subprocess.run(
            self._arguments,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_COMMAND_SECONDS,
        )
        return result.returncode == 0


def watch_notice(settings: RunSettings, world: World, callback: Callable[[], None]) -> AbstractContextManager[object]:
    """Return the watch that a config asks for, on the first rank of each node; elsewhere, one that does nothing."""
    if settings.notice_command is None or world.local_rank > 0:
        return nullcontext()

    def stop() -> None:
        if world.launcher is not None:
            # It ends with its ranks. Otherwise, torchrun would restart ranks that end by themselves, on this node.
            with suppress(ProcessLookupError):
                os.kill(world.launcher.pid, signal.SIGTERM)
        callback()

    return NoticeWatch(settings.notice_command, stop, seconds=settings.notice_seconds)
