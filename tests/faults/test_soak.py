"""Half an hour of random faults: the run ends with the losses of one that nothing has disturbed."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.small_disk import small_disk
from helpers.train_process import children, is_running
from stretto.base.log_segments import list_segments
from stretto.checkpoint.checkpoint import find_checkpoint, read_claims
from stretto.checkpoint.storage import LocalStorage
from stretto.train.log import read_lines

pytestmark = pytest.mark.soak
SECONDS_BETWEEN_FAULTS = 30.0
# A pause makes the disturbed run slow enough that the undisturbed one, without it, takes only minutes.
MODEL = """
import os, time, torch
from stretto import nn

class Pause(nn.Block):
    def forward(self, x, state):
        time.sleep(float(os.environ.get("SOAK_PAUSE", 0)))
        return x, state

def build(task):
    blocks = [nn.Embedding(task.num_inputs, 16), nn.LSTM(16, 16), nn.LSTM(16, 16), nn.Linear(16, task.num_outputs)]
    return nn.Stack([Pause(), *blocks]).to(torch.float64)
"""


@dataclass
class RestartedRun:
    """A run whose launcher is started again whenever it can resume."""

    folder: Path
    command: list[str]
    output: Path
    process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "SOAK_PAUSE": "0.02"}
        with self.output.open("ab") as stream:
            self.process = subprocess.Popen(self.command, env=environment, stdout=stream, stderr=stream)

    def keep_alive(self, seconds: float) -> None:
        """Wait; meanwhile start the launcher again if it has been killed."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert self.process is not None
            code = self.process.poll()
            if code is not None:
                assert code in (75, -signal.SIGKILL), f"exit code {code}:\n{self.output.read_text()[-5000:]}"
                self.start()
            time.sleep(0.1)

    def processes(self) -> list[int]:
        """Return the launcher and its ranks."""
        assert self.process is not None
        return [self.process.pid, *children(self.process.pid)]

    def newest_step(self) -> int:
        """Return the last step near the end of the log; 0 if there is none."""
        last_bytes = b""
        with suppress(FileNotFoundError):
            last_bytes = (self.folder / "log.jsonl").read_bytes()[-10_000:]
        return max((int(step) for step in re.findall(rb'"kind": "step", "step": (\d+),', last_bytes)), default=0)

    def await_progress(self, seconds: float = 120) -> None:
        """Wait for ten more steps."""
        first, until = self.newest_step(), time.monotonic() + seconds
        while self.newest_step() < first + 10:
            assert time.monotonic() < until, f"the run is stuck:\n{self.output.read_text()[-5000:]}"
            self.keep_alive(0.5)


def kill_a_rank(run: RestartedRun, generator: random.Random) -> None:
    ranks = run.processes()[1:]
    if ranks:
        kill(generator.choice(ranks))


def stop_a_rank(run: RestartedRun, generator: random.Random) -> None:
    ranks = run.processes()[1:]
    if ranks:
        victim = generator.choice(ranks)
        kill(victim, signal.SIGSTOP)
        time.sleep(5)
        kill(victim, signal.SIGCONT)


def kill_the_launcher(run: RestartedRun, generator: random.Random) -> None:
    kill(run.processes()[0])


def fill_the_disk(run: RestartedRun, generator: random.Random) -> None:
    filler = run.folder.parent / "filler"
    try:
        with filler.open("wb", buffering=0) as stream, suppress(OSError):
            while True:
                stream.write(bytes(1 << 12))
        time.sleep(5)
    finally:
        filler.unlink()


def tear_the_log(run: RestartedRun, generator: random.Random) -> None:
    """Kill all processes at once, and leave a part of the last line."""
    processes = run.processes()
    for pid in processes:
        kill(pid)
    while any(map(is_running, processes)):
        time.sleep(0.02)
    log = run.folder / "log.jsonl"
    if log.exists() and log.stat().st_size:
        last_line = log.read_bytes()[-10_000:].splitlines(keepends=True)[-1]
        os.truncate(log, log.stat().st_size - generator.randint(1, len(last_line) - 1))


FAULTS: tuple[Callable[[RestartedRun, random.Random], None], ...] = (
    kill_a_rank,
    stop_a_rank,
    kill_the_launcher,
    fill_the_disk,
    tear_the_log,
)


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that can be filled in a moment."""
    with small_disk(tmp_path / "disk", megabytes=200) as folder:
        yield folder


@pytest.mark.timeout(0)
def test_a_run_with_random_faults_ends_with_the_losses_of_an_undisturbed_one(
    faults_data: Path, disk: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    seed = pytestconfig.getoption("soak_seed")
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    generator = random.Random(seed)
    folder, expected_folder = disk / "run", tmp_path / "undisturbed"
    config = tmp_path / "run.toml"
    (tmp_path / "model.py").write_text(MODEL)
    config.write_text(
        f'[data]\ntrain = "{faults_data}"\nlanes = 6\nwindow = 12\n[model]\nfactory = "{tmp_path / "model.py"}:build"\n'
        # With plain gradient steps that are this small, rounding errors of two layouts do not grow.
        '[train]\noptimizer = "sgd"\nlr = 0.001\nschedule = "constant"\n'
        "[save]\nevery = 40\n[run]\nlog_every = 200\ntimeout = 60\n"
    )
    command = [sys.executable, "-m", "stretto", "train", str(config)]
    layout = ["--layout.replicas", "2", "--run.folder", str(folder), "--train.steps", str(10**9)]
    run = RestartedRun(folder, [*command, *layout], tmp_path / "output")
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\nfaults with --soak-seed {seed}:", end=" ", flush=True)
        run.start()
        try:
            until = time.monotonic() + 60 * pytestconfig.getoption("soak_minutes")
            faults: list[Callable[[RestartedRun, random.Random], None]] = []
            while time.monotonic() < until:
                # Each kind once, in a random order; then again.
                faults = faults or generator.sample(FAULTS, len(FAULTS))
                run.keep_alive(SECONDS_BETWEEN_FAULTS)
                fault = faults.pop()
                print(f"{fault.__name__} after step {run.newest_step()},", end=" ", flush=True)
                fault(run, generator)
                run.keep_alive(0.1)
            run.await_progress()
            assert run.process is not None
            run.process.send_signal(signal.SIGTERM)
            assert run.process.wait(60) == 75, run.output.read_text()[-5000:]
        finally:
            if run.process is not None and run.process.poll() is None:
                for pid in run.processes():
                    kill(pid)
        num_steps = find_checkpoint(folder).manifest.training_state.step
        num_launches = len(read_claims(LocalStorage(folder / "checkpoints")))
        print(f"{num_steps} steps in {num_launches} launches", flush=True)
    options = ["--run.folder", str(expected_folder), "--train.steps", str(num_steps), "--save.minutes", "0"]
    subprocess.run([*command, *options, "--save.every", str(10**9)], stdout=subprocess.DEVNULL, check=True)
    expected, losses = losses_by_step(expected_folder), losses_by_step(folder)
    assert len(expected) == num_steps and max(losses) == num_steps
    # A full disk costs lines of the log; no line is of a step that was lost.
    assert len(losses) > 0.5 * num_steps
    assert losses == pytest.approx({step: expected[step] for step in losses}, abs=1e-9, rel=0)


def losses_by_step(folder: Path) -> dict[int, float]:
    """Return all losses in the log of a run; no step may be in it twice."""
    steps = [values for kind, values in read_lines(list_segments(folder / "log.jsonl")) if kind == "step"]
    losses = {int(str(values["step"])): float(str(values["loss"])) for values in steps}
    assert len(losses) == len(steps)
    return losses
