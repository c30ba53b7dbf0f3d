"""RankProcesses: the processes of `stretto.spawn`: their start, their output, and their end."""

import codecs
import io
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, TextIO

# Interrupted ranks have this many seconds to save.
GRACE_SECONDS = 60.0
# If a rank fails, the others have this long to report what they know.
_END_SECONDS = 3.0
_POLL_SECONDS = 0.05
_READ_BYTES = 1 << 16


class RankProcesses:
    """Starts a process per environment, and kills those that still run when the context ends."""

    def __init__(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        self._selector = selectors.DefaultSelector()
        self.ended_ranks: list[int] = []  # in the order in which they ended
        # A notebook, or a test, replaces these streams; a process can inherit only the real ones.
        self._targets = [
            None if stream is original else stream
            for stream, original in ((sys.stdout, sys.__stdout__), (sys.stderr, sys.__stderr__))
        ]
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for environment in environments:
                self._processes.append(self._start(command, environment))
        except BaseException:
            self._kill()
            raise

    @property
    def exit_codes(self) -> list[int]:
        """The exit codes, by rank, when all have ended."""
        return [process.returncode for process in self._processes]

    def __enter__(self) -> "RankProcesses":
        return self

    def __exit__(self, *error: object) -> None:
        self._kill()
        self._selector.close()

    def wait(self) -> None:
        """Wait until all have ended, and forward what they print; if one fails, the others end soon after."""
        try:
            self._wait_until_ended(float("inf"))
        except KeyboardInterrupt:
            # The ranks are not in our process group, so a terminal has sent it to us alone. They may save now.
            self._send(signal.SIGINT)
            self._wait_until_ended(GRACE_SECONDS, is_interrupted=True)
            raise
        self._kill()

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        stdout, stderr = (None if target is None else subprocess.PIPE for target in self._targets)
        process = subprocess.Popen(
            command,
            env={**environment, **({} if stdout is None else {"PYTHONUNBUFFERED": "1"})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            process_group=0,  # so that Ctrl-C in a terminal reaches this process only
        )
        for pipe, target in zip((process.stdout, process.stderr), self._targets, strict=True):
            if pipe is not None and target is not None:
                os.set_blocking(pipe.fileno(), False)
                self._selector.register(pipe, selectors.EVENT_READ, _Forwarder(pipe, target))
        return process

    def _wait_until_ended(self, seconds: float, *, is_interrupted: bool = False) -> None:
        """Wait until all ranks have ended, for at most `seconds`, or _END_SECONDS after one has failed."""
        deadline = time.monotonic() + seconds
        while len(self.ended_ranks) < len(self._processes) and time.monotonic() < deadline:
            self._forward(_POLL_SECONDS)
            for rank, process in enumerate(self._processes):
                if rank not in self.ended_ranks and process.poll() is not None:
                    self.ended_ranks.append(rank)
                    if process.returncode and not is_interrupted:
                        deadline = min(deadline, time.monotonic() + _END_SECONDS)
        while self._forward(0):
            pass  # what they have printed last

    def _forward(self, seconds: float) -> bool:
        """Forward what has been printed; wait for it for up to `seconds`. Return whether there was something."""
        if not self._selector.get_map():
            time.sleep(seconds)
            return False
        ready = self._selector.select(seconds)
        for key, _ in ready:
            if not key.data.forward():
                self._selector.unregister(key.fileobj)
        return bool(ready)

    def _send(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _kill(self) -> None:
        for rank, process in enumerate(self._processes):
            if process.poll() is None:
                process.kill()
            process.wait()
            if rank not in self.ended_ranks:
                self.ended_ranks.append(rank)
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


class _Forwarder:
    """Copies what a rank prints to a stream of this process, line by line, as ranks print at the same time."""

    def __init__(self, pipe: IO[bytes], target: TextIO | io.TextIOBase) -> None:
        self._pipe, self._target = pipe, target
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._line = ""  # that has not ended yet

    def forward(self) -> bool:
        """Copy what is there; return False at the end."""
        content = os.read(self._pipe.fileno(), _READ_BYTES)
        text = self._line + self._decoder.decode(content, final=not content)
        end = max(text.rfind("\n"), text.rfind("\r")) + 1 if content else len(text)  # \r: a progress bar
        self._line = text[end:]
        self._target.write(text[:end])
        self._target.flush()
        return bool(content)
