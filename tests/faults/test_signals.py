"""Preemption signals, stopped ranks, open ports and full disks."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.train_process import SAVE_EVERY, ReferenceRuns, TrainProcess, children

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


@pytest.mark.parametrize("grid", [(1, 1), (2, 1)])
def test_ranks_do_not_outlive_their_launcher(grid: tuple[int, int], faults_data: Path, tmp_path: Path) -> None:
    options: dict[str, object] = {"train.steps": 10**6, "save.every": 10**6}
    run = TrainProcess(tmp_path / "run", faults_data, grid, options).start()
    run.await_step(5)
    ranks = run.ranks()
    assert len(ranks) == grid[0] * grid[1] and run.process is not None
    run.process.kill()
    until = time.monotonic() + 30
    while time.monotonic() < until and any(Path(f"/proc/{pid}").exists() for pid in ranks):
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    _, output = run.finish()
    # Several ranks have lost the launcher's store too, without which they can't agree that all shards are written.
    if grid == (1, 1):
        assert "as requested; that step is saved" in output and run.final_state().training_state.step >= 5  # type: ignore[attr-defined]
    else:
        assert "that step is saved" not in output and output.count("stretto: error") == 1, output
        assert "has ended without its ranks, so they stop; start it again" in output, output


def test_a_stopped_rank_is_named_with_its_last_action(faults_data: Path, tmp_path: Path) -> None:
    options: dict[str, object] = {"train.steps": 10**6, "run.timeout": 6, "run.max_restarts": 0}
    run = TrainProcess(tmp_path / "run", faults_data, (1, 2), options).start()
    run.await_step(5)
    ranks = run.ranks()
    time.sleep(1.5)
    os.kill(ranks[1], signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        while Path(f"/proc/{ranks[0]}").exists() and time.monotonic() - stopped < 60:
            time.sleep(0.1)
        named = time.monotonic() - stopped
    finally:
        # The launcher would kill it after a grace period; a stopped process handles no other signal.
        os.kill(ranks[1], signal.SIGKILL)
    code, output = run.finish()
    assert code == 75, output
    assert re.search(r"rank 0 lost rank 1 \(replica 0, stage 1, last seen [^)]+\) while ", output), output
    assert named < 6 + 3 + 5, f"it took {named:.1f} s"


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
    second = TrainProcess(tmp_path / "run", faults_data, (1, 1), {"run.max_restarts": 0}).start()
    code, output = second.finish()
    run.process.kill()
    run.finish()
    assert sockets, listed
    for row in sockets:
        address = row.split()[4]
        assert address.startswith(("127.", "[::1]", "[::ffff:127.")), row
    # A second run in the same folder is refused, and names the first.
    assert code == 2 and re.search(r"checkpoints is in use by process \d+ on \S+; wait for that run to end", output), (
        output
    )


def test_a_full_disk_leaves_the_last_checkpoint_intact(faults_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        assert "CI" not in os.environ
        pytest.skip("only root can mount a small disk")
    try:
        run = TrainProcess(folder / "run", faults_data, (2, 1), {"save.keep": 1000, "run.max_restarts": 0}).start()
        # Fill the disk right after a save: one that is under way would free what it has written when it fails.
        run.await_checkpoint()
        with (folder / "filler").open("wb", buffering=0) as filler, suppress(OSError):
            while True:
                filler.write(bytes(1 << 12))
        code, output = run.finish()
        # The run continued with a warning; that it could not save at the end is an error.
        assert code == 2, output
        assert re.search(r"warning: step \d+ was not saved: .*disk/run.*No space left on device", output), output
        final_state = run.final_state()
        assert final_state.training_state.step >= SAVE_EVERY  # type: ignore[attr-defined]
        (folder / "filler").unlink()
        code, output = TrainProcess(folder / "run", faults_data, (2, 1)).start().finish()
        assert code == 0 and "resume  after step" in output, output
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        code, output = TrainProcess(folder / "other", faults_data, (1, 1), {"run.max_restarts": 0}).start().finish()
        assert code == 2 and "run.folder=" in output and "can't be written (Read-only file system)" in output, output
    finally:
        subprocess.run(["umount", str(folder)], check=True)
