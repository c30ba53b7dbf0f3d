"""Preemption signals, and the ports that a run listens on."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.train_process import ReferenceRuns, TrainProcess, children

pytestmark = pytest.mark.faults


@pytest.mark.parametrize(
    ("grid", "number", "whom"),
    [
        ((1, 1), signal.SIGTERM, "alone"),
        ((1, 1), signal.SIGUSR1, "alone"),
        ((2, 1), signal.SIGTERM, "launcher"),
        ((2, 1), signal.SIGUSR1, "launcher"),
        ((1, 2), signal.SIGTERM, "rank"),
        ((2, 2), signal.SIGUSR1, "rank"),
    ],
)
def test_a_preempted_run_saves_and_resumes_later(
    grid: tuple[int, int],
    number: signal.Signals,
    whom: str,
    reference_runs: ReferenceRuns,
    faults_data: Path,
    tmp_path: Path,
) -> None:
    expected = reference_runs[grid]
    # A single rank has no launcher; with several, the launcher does not restart ranks that were preempted.
    options: dict[str, object] = {"run.max_restarts": 0 if whom == "alone" else 3, "save.every": 1000}
    run = TrainProcess(tmp_path / "run", faults_data, grid, options).start()
    run.await_step(11)
    assert run.process is not None
    started = time.monotonic()
    if whom == "rank":
        assert run.kill(grid[0] * grid[1] - 1, number)
    else:
        run.process.send_signal(number)
    code, output = run.finish()
    assert time.monotonic() - started < 20
    assert code == 75, output
    message = r"stretto: stopped after step (\d+), as requested; that step is saved, so start again to resume"
    found = re.findall(message, output)
    assert len(found) == 1, output
    left = TrainProcess(tmp_path / "run", faults_data, grid, options)
    assert left.final_state().training_state.step == int(found[0]) >= 11  # type: ignore[attr-defined]
    code, output = left.start().finish()
    assert code == 0 and f"resume  after step {found[0]}" in output, output
    assert left.final_state() == expected


@pytest.mark.parametrize("grid", [(1, 1), (2, 1)])
@pytest.mark.parametrize("seconds", [0.5, 2.0, 4.0])
def test_a_run_preempted_before_its_first_step_can_be_restarted(
    grid: tuple[int, int], seconds: float, faults_data: Path, tmp_path: Path
) -> None:
    restarts = 0 if grid == (1, 1) else 3
    run = TrainProcess(
        tmp_path / "run", faults_data, grid, {"run.max_restarts": restarts, "train.steps": 10**6}
    ).start()
    time.sleep(seconds)
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    code, output = run.finish()
    # In the first moments, while Python starts, the handler is not installed yet, so the signal ends the process.
    assert code == 75 or (seconds < 1 and code in (-signal.SIGTERM, 143)), output
    assert "Traceback" not in output, output
    assert code != 75 or re.search("stretto: .*(before the first step|after step|SIGTERM has ended)", output), output


def test_a_second_signal_does_not_end_the_launcher_before_the_ranks_have_saved(
    faults_data: Path, tmp_path: Path
) -> None:
    options: dict[str, object] = {"train.steps": 10**6, "save.every": 10**6}
    run = TrainProcess(tmp_path / "run", faults_data, (2, 1), options).start()
    run.await_step(5)
    assert run.process is not None
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
        run.process.send_signal(number)
        time.sleep(0.02)
    code, output = run.finish()
    assert code == 75 and "as requested; that step is saved" in output, output


@pytest.mark.parametrize("command", ["train", "predict", "verify", "profile"])
def test_a_command_preempted_while_it_imports_torch_can_be_restarted(
    command: str, faults_data: Path, tmp_path: Path
) -> None:
    config = TrainProcess(tmp_path / "run", faults_data).config()
    # Stands in for a slow disk: the import waits until the signal comes.
    (tmp_path / "torch.py").write_text(f"import time; open({str(tmp_path / 'begun')!r}, 'w'); time.sleep(60)")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    arguments = [sys.executable, "-m", "stretto", command, str(config)]
    process = subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "begun").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=10)
    message = "stretto: stopped before the first step of this launch; nothing new was saved\n"
    assert (process.returncode, errors) == (75, message if command == "train" else "")


def test_a_run_on_one_machine_listens_on_loopback_only(faults_data: Path, tmp_path: Path) -> None:
    if shutil.which("ss") is None:
        assert "CI" not in os.environ
        pytest.skip("needs ss")
    run = TrainProcess(tmp_path / "run", faults_data, (1, 2), {"train.steps": 10**6}).start()
    run.await_step(3)
    assert run.process is not None
    pids = [run.process.pid, *run.ranks(), *(child for pid in run.ranks() for child in children(pid))]
    listed = subprocess.run(["ss", "-lntupH"], capture_output=True, text=True, check=True).stdout.splitlines()
    sockets = [row for row in listed if any(f"pid={pid}," in row for pid in pids)]
    run.process.kill()
    run.finish()
    assert sockets, listed
    for row in sockets:
        address = row.split()[4]
        assert address.startswith(("127.", "[::1]", "[::ffff:127.")), row
