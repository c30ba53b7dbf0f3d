"""A small `stretto train` run in its own processes, for tests that kill it, and its final state."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load_file

from stretto.checkpoint.checkpoint import Checkpoint, find_checkpoint
from stretto.checkpoint.manifest import MANIFEST

STEPS = 60
SAVE_EVERY = 7
_started: list["TrainProcess"] = []  # by the present test


@dataclass
class TrainProcess:
    """One run: start it, disturb it, wait for its end."""

    folder: Path
    data: Path
    grid: tuple[int, int] = (1, 1)  # replicas, stages
    options: dict[str, object] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)  # of the command, besides the config's fields
    config_file: Path | None = None  # by default, one for all runs on this data
    process: subprocess.Popen[str] | None = None
    lines: list[str] = field(default_factory=list)  # of the output so far

    def command(self) -> list[str]:
        replicas, stages = self.grid
        fields: dict[str, object] = {
            "run.folder": self.folder,
            "layout.replicas": replicas,
            "layout.stages": stages,
            "layout.chunks": 2 if stages > 1 else 1,
            "run.max_restarts": 3,
            **self.options,
        }
        listed = [text for name, value in fields.items() for text in (f"--{name}", str(value))]
        return [sys.executable, "-m", "stretto", "train", str(self.config()), *self.arguments, *listed]

    def config(self) -> Path:
        path = self.config_file or self.data.parent / "run.toml"
        if not path.exists():
            path.write_text(
                f'[data]\ntrain = "{self.data}"\nlanes = 6\nwindow = 24\n'
                "[model]\nhidden = 24\nlayers = 2\ndropout = 0.1\n"
                f"[train]\nsteps = {STEPS}\nwarmup = 5\nweight_decay = 0.01\n"
                f"[save]\nevery = {SAVE_EVERY}\nminutes = 0\n[run]\nlog_every = 20\ntimeout = 60\n"
            )
        return path

    def start(self) -> "TrainProcess":
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **self.environment}
        self.process = subprocess.Popen(
            self.command(), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        # Read all the time: a run would stop when the pipe is full.
        self._reader = threading.Thread(target=self._read_output, args=(self.process,), daemon=True)
        self._reader.start()
        _started.append(self)
        return self

    def _read_output(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.lines = []
        with process.stdout:
            self.lines.extend(process.stdout)

    def finish(self, seconds: float = 180) -> tuple[int, str]:
        """Wait for the run to end by itself, with all its ranks; return its exit code and output."""
        assert self.process is not None
        until = time.monotonic() + seconds
        try:
            self.process.wait(seconds)
            self._reader.join(until - time.monotonic())  # the ranks have the pipe, too
            if self._reader.is_alive():
                raise subprocess.TimeoutExpired(self.process.args, seconds)
        except subprocess.TimeoutExpired:
            self.end()
            raise
        return self.process.returncode, "".join(self.lines)

    def end(self) -> None:
        """Kill the launcher and the ranks that still run."""
        assert self.process is not None
        for pid in [self.process.pid, *self.ranks()] if self.process.poll() is None else []:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def ranks(self) -> list[int]:
        """Return the processes of the ranks that have been started, in order."""
        assert self.process is not None
        return [pid for pid in children(self.process.pid) if b"\0train\0" in _read(f"/proc/{pid}/cmdline")]

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> bool:
        """Send a signal to a rank; return False if it is not running."""
        ranks = self.ranks()
        if rank >= len(ranks):
            return False
        try:
            os.kill(ranks[rank], number)
        except ProcessLookupError:
            return False
        return True

    def await_step(self, step: int, seconds: float = 90) -> None:
        """Wait until a step is in the log."""
        until = time.monotonic() + seconds
        needle = f'"kind": "step", "step": {step},'
        while time.monotonic() < until:
            log = self.folder / "log.jsonl"
            if log.exists() and needle in log.read_text():
                return
            assert self.process is not None and self.process.poll() is None, "the run has ended"
            time.sleep(0.02)
        raise AssertionError(f"step {step} was not reached")

    def await_checkpoint(self, seconds: float = 90) -> None:
        """Wait until a checkpoint is complete."""
        until = time.monotonic() + seconds
        while not any((self.folder / "checkpoints").glob(f"*/{MANIFEST}")):
            assert self.process is not None and self.process.poll() is None, "the run has ended"
            assert time.monotonic() < until, "no checkpoint was saved"
            time.sleep(0.005)

    def final_state(self) -> "FinalState":
        """Return the final state of the run."""
        return FinalState.of(find_checkpoint(self.folder))


@dataclass(frozen=True)
class FinalState:
    """The last checkpoint of a run: its training state, and the bytes of all tensors by file."""

    training_state: object
    tensors: dict[str, dict[str, bytes]]

    @classmethod
    def of(cls, saved: Checkpoint) -> "FinalState":
        manifest = saved.manifest
        for file in manifest.files:
            assert saved.check(file) is None
        # Not the checksums of the files: the order of a safetensors header is not fixed.
        folder = Path(saved.location)
        shards = {file.name: load_file(folder / file.name) for file in manifest.files if file.groups}
        tensors = {
            name: {key: value.numpy().tobytes() for key, value in shard.items()} for name, shard in shards.items()
        }
        return cls(manifest.training_state, tensors)


class ReferenceRuns:
    """The final states of undisturbed runs, by layout; each runs on first use."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._final_states: dict[tuple[int, int], FinalState] = {}

    def __getitem__(self, grid: tuple[int, int]) -> FinalState:
        if grid not in self._final_states:
            run = TrainProcess(self._data.parent / f"undisturbed-{grid[0]}x{grid[1]}", self._data, grid)
            code, output = run.start().finish()
            assert code == 0 and f"step {STEPS}/{STEPS}" in output, output
            self._final_states[grid] = run.final_state()
        return self._final_states[grid]


def end_started_runs() -> None:
    """Kill the runs that a test has started, and that have not ended because an assertion failed."""
    while _started:
        _started.pop().end()


def is_running(pid: int) -> bool:
    """Is a process running? A zombie, whose parent has not waited for it, is not."""
    status = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return bool(status) and status[0] != b"Z"


def await_exit(pid: int, seconds: float = 60) -> None:
    """Wait until a process, which need not be a child of this one, has ended."""
    until = time.monotonic() + seconds
    while is_running(pid):
        assert time.monotonic() < until, "the rank still runs"
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    pids: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        pids += map(int, _read(str(thread)).split())
    return sorted(pids)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
