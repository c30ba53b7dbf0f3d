"""RankJob: the ranks of one check, each a new process, which can hang or crash without harm to this one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stretto.launch.gpu_checks.catalog import GpuCheck
from stretto.launch.gpu_checks.result import Backend
from stretto.launch.rank_environment import rank_environments

# Importing torch from a network file system, and starting CUDA and NCCL, takes a while.
START_SECONDS = 180.0
# If a rank fails, the others have this long to end too.
_END_SECONDS = 3.0
_STACK_SECONDS = 2.0
_MAX_OUTPUT_LINES = 20
STACK_SIGNAL = signal.SIGUSR2
"""A rank that receives it writes its stack to a file, whatever it waits for."""


class RankJob:
    """Starts the ranks of a check in `folder`, and ends them when the context ends."""

    def __init__(self, check: GpuCheck, num_ranks: int, backend: Backend, device: str, folder: Path) -> None:
        self.folder = folder
        command = [sys.executable, "-P", "-m", "stretto.launch.gpu_checks.rank_main", check.name, device, str(folder)]
        self.processes = []
        for rank, environment in enumerate(_environments(num_ranks, backend, folder)):
            with (folder / f"rank-{rank}.output").open("wb") as output:
                self.processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))

    def __enter__(self) -> "RankJob":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until a condition is true; return False after `seconds`, or when a rank has failed."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or any(process.poll() for process in self.processes):
                return False
            time.sleep(0.05)
        return True

    def has_joined(self) -> bool:
        """Return whether all ranks have joined each other."""
        return all(self.status(rank) for rank in range(len(self.processes)))

    def has_ended(self) -> bool:
        """Return whether all ranks have ended."""
        return all(process.poll() is not None for process in self.processes)

    def wait(self, seconds: float) -> str | None:
        """Wait for all ranks to end; return None if all succeed, else one sentence that says what went wrong.

        `seconds` counts from when all ranks have joined each other.
        """
        has_joined = self.wait_until(self.has_joined, START_SECONDS)
        if has_joined and self.wait_until(self.has_ended, seconds) and not any(p.returncode for p in self.processes):
            return None
        if any(process.poll() for process in self.processes):
            self._wait_for_others()
            return self._describe_failure()
        problem = f"hung after {seconds:.0f} s" if has_joined else f"did not start within {START_SECONDS:.0f} s"
        return f"{problem}; {self.describe_hang()}"

    def status(self, rank: int) -> str:
        """Return what a rank was doing last; empty before it has joined the others."""
        path = self.folder / f"rank-{rank}.status"
        return path.read_text() if path.exists() else ""

    def output(self, rank: int) -> list[str]:
        """Return the last lines that a rank has printed."""
        text = (self.folder / f"rank-{rank}.output").read_text(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-_MAX_OUTPUT_LINES:]

    def describe_ranks(self) -> list[dict[str, Any]]:
        """Return each rank's exit code, status and last output, and its stack if it hung."""
        return [
            {
                "exit_code": process.poll(),
                "status": self.status(rank),
                "stack": self._stack(rank),
                "output": self.output(rank),
            }
            for rank, process in enumerate(self.processes)
        ]

    def _wait_for_others(self) -> None:
        deadline = time.monotonic() + _END_SECONDS
        while not self.has_ended() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _describe_failure(self) -> str:
        """Return the error of the rank that most likely failed first: one that did not lose another rank."""
        codes = {rank: process.returncode for rank, process in enumerate(self.processes) if process.returncode}
        rank = min(codes, key=lambda rank: (codes[rank] == 75, rank))
        code = codes[rank]
        lines = self.output(rank)
        reason = lines[-1].removeprefix("stretto: error: ") if lines else f"exit code {code}"
        return (
            f"rank {rank} was killed by {signal.Signals(-code).name}" if code < 0 else f"rank {rank} failed: {reason}"
        )

    def describe_hang(self) -> str:
        """Return what each rank is doing: its status, and where in our code its main thread is."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(STACK_SIGNAL)
        time.sleep(_STACK_SECONDS)
        descriptions = []
        for rank, process in enumerate(self.processes):
            stack = self._stack(rank)
            place = f" ({stack[0]})" if stack else ""
            ended = "" if process.poll() is None else "ended, "
            descriptions.append(f"rank {rank}: {ended}{self.status(rank) or 'starting'}{place}")
        return "; ".join(descriptions)

    def _stack(self, rank: int) -> list[str]:
        """Return the lines of our code in a rank's stack, innermost first, such as `mesh/channel.py:49 in receive`."""
        path = self.folder / f"rank-{rank}.stack"
        text = path.read_text(errors="replace") if path.exists() else ""
        # The first line is the main thread's number, then there is one paragraph per thread.
        main_thread, *threads = text.split("\n\n")
        main_stack = next((thread for thread in threads if main_thread in thread), "")
        lines = []
        for line in main_stack.splitlines():
            location, _, function = line.strip().rpartition(" in ")
            file, _, number = location.removeprefix("File ").partition(", line ")
            _, is_ours, path_in_package = file.strip('"').rpartition("/stretto/")
            if is_ours:
                lines.append(f"{path_in_package}:{number} in {function}")
        return lines


def _environments(num_ranks: int, backend: Backend, folder: Path) -> list[dict[str, str]]:
    """Return the environment of each rank; temporary files of killed ranks are removed with the folder."""
    own = {"TMPDIR": str(folder), "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN")}  # NCCL then says why it fails
    environments = [{**environment, **own} for environment in rank_environments(num_ranks, num_threads=1)]
    for environment in environments:
        environment.pop("STRETTO_BACKEND", None)
        if backend == "strict":
            environment["STRETTO_BACKEND"] = backend
    return environments
