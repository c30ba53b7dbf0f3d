"""leader_lock: lets only one start of a preparation work in a folder, on whichever machines.

`parts/leader` is a file that only one process can create. It holds the token of that start, and changes every second.
If it has not changed for a minute, its process was killed, and another one may take its place. A process that was only
paused finds another token there, and stops before it changes anything that counts.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from stretto.base.errors import DataError
from stretto.base.jitter import jitter
from stretto.prepare.work_folder import LEADER, LocalWorkFolder, WorkFolder

LOST_AFTER_SECONDS = 60.0
BEAT_SECONDS = 1.0
POLL_SECONDS = 0.3
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class LeaderLock:
    """The lock of this process; `values` are for the other ranks of the same start."""

    def __init__(self, folder: WorkFolder, values: Mapping[str, Any], lost_after: float) -> None:
        self.token = uuid4().hex[:16]
        self._folder, self._lost_after = folder, lost_after
        self._values = {"token": self.token, "machine": _machine(), **values}
        self._heartbeat = Heartbeat(BEAT_SECONDS, self._beat)

    def __enter__(self) -> Self:
        """Create the file; raise if that of another process changes, and wait until it is old if it does not."""
        seen, since = None, time.monotonic()
        while not self._folder.create(LEADER, self._record(0)):
            content, now = read_or_empty(self._folder, LEADER), time.monotonic()
            if content != seen:
                if seen and content:
                    remedy = "wait for it or choose a different folder"
                    raise DataError(f"{self._folder.location} is being written by another process; {remedy}")
                seen, since = content, now
            if self._is_dead(content) or now - since > self._lost_after:
                self._folder.remove([LEADER])
            else:
                time.sleep(jitter(POLL_SECONDS))
        self._heartbeat.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the file."""
        self.stop_beating()
        if self.is_held:
            self._folder.remove([LEADER])

    @property
    def is_held(self) -> bool:
        """Whether no other process has taken the place of this one."""
        return _token(read_or_empty(self._folder, LEADER)) == self.token

    def check(self) -> None:
        """Raise if another process has taken the place of this one."""
        if not self.is_held:
            problem = "was not heard from for too long, and another process has begun to write it"
            raise DataError(f"{self._folder.target}: this process {problem}; wait for that one")

    def stop_beating(self) -> None:
        """Let the file change no more; it stays until the end of the context."""
        self._heartbeat.stop()

    def _is_dead(self, content: bytes) -> bool:
        """Whether the process was on this machine: there, `exclusive` lets only one be here at a time."""
        machine = json.loads(content).get("machine") if content else None
        return isinstance(self._folder, LocalWorkFolder) and machine is not None and machine == _machine()

    def _record(self, number: int) -> bytes:
        return json.dumps({**self._values, "beat": number}).encode()

    def _beat(self, number: int) -> None:
        if self.is_held:
            self._folder.write(LEADER, self._record(number))


class Heartbeat:
    """A thread that calls `beat` with 1, 2, ... every few seconds, until it is stopped."""

    def __init__(self, seconds: float, beat: Callable[[int], object]) -> None:
        self._seconds, self._beat = seconds, beat
        self._is_over, self._thread = threading.Event(), threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._is_over.wait(self._seconds):
            number += 1
            # What fails here is reported by the thread that does the work, which uses the same folder.
            with suppress(DataError, OSError):
                self._beat(number)


@contextmanager
def heartbeat(folder: WorkFolder, name: str, seconds: float) -> Iterator[None]:
    """Write a file that changes every few seconds, until the end of the context."""
    thread = Heartbeat(seconds, lambda number: folder.write(name, str(number).encode()))
    thread.start()
    try:
        yield
    finally:
        thread.stop()


def read_leader(folder: WorkFolder) -> tuple[bytes, dict[str, Any]]:
    """Return the file of the process that holds the lock, and what it says; nothing if there is none."""
    content = read_or_empty(folder, LEADER)
    return content, json.loads(content) if content else {}


def read_or_empty(folder: WorkFolder, name: str) -> bytes:
    """Return the content of a file; nothing if it does not exist."""
    try:
        return folder.read(name)
    except FileNotFoundError:
        return b""


def _token(content: bytes) -> str:
    return str(json.loads(content).get("token", "")) if content else ""


def _machine() -> str | None:
    """Return a name that no other machine has, and this one only until it restarts."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else None
