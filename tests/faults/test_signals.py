"""Signals, and what else a machine does to a run: it saves, leaves, names who hangs, and keeps to itself."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from helpers.train_process import SAVE_EVERY, ReferenceRuns, TrainProcess, children

pytestmark = pytest.mark.faults


@pytest.mark.parametrize(
    ("grid", "number", "whom"),
    [
        ((1, 1), signal.SIGTERM, "alone"),
        ((1, 1), signal.SIGUSR1, "alone"),
        pytest.param((2, 1), signal.SIGTERM, "launcher", marks=pytest.mark.short),
        ((2, 1), signal.SIGUSR1, "launcher"),
        ((1, 2), signal.SIGTERM, "rank"),
        ((2, 2), signal.SIGUSR1, "rank"),
    ],
)
def test_a_run_that_is_asked_to_leave_saves_and_goes_on_later(
    grid: tuple[int, int],
    number: signal.Signals,
    whom: str,
    reference_runs: ReferenceRuns,
    faults_data: Path,
    tmp_path: Path,
) -> None:
    expected = reference_runs[grid]
    # Alone, it is watched by nobody; of several, none is started again that was asked to leave.
    options: dict[str, object] = {"run.restarts": 0 if whom == "alone" else 3, "save.every": 1000}
    run = TrainProcess(tmp_path / "run", faults_data, grid, options).start()
    run.await_step(11)
    assert run.process is not None
    started = time.monotonic()
    if whom == "rank":
        assert run.kill(grid[0] * grid[1] - 1, number)
    else:
        run.process.send_signal(number)
    code, said = run.finish()
    assert time.monotonic() - started < 20
    assert code == 75, said
    found = re.findall(r"stretto: left after step (\d+), as asked: it is saved, and the run goes on from there", said)
    assert len(found) == 1, said
    left = TrainProcess(tmp_path / "run", faults_data, grid, options)
    assert left.final_state().training_state.step == int(found[0]) >= 11  # type: ignore[attr-defined]
    code, said = left.start().finish()
    assert code == 0 and f"resume  after step {found[0]}" in said, said
    assert left.final_state() == expected


@pytest.mark.parametrize("grid", [(1, 1), (2, 1)])
@pytest.mark.parametrize("seconds", [0.5, 2.0, 4.0])
def test_a_run_that_is_asked_to_leave_before_its_first_step_may_be_started_again(
    grid: tuple[int, int], seconds: float, faults_data: Path, tmp_path: Path
) -> None:
    restarts = 0 if grid == (1, 1) else 3
    run = TrainProcess(tmp_path / "run", faults_data, grid, {"run.restarts": restarts, "train.steps": 10**6}).start()
    time.sleep(seconds)
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    code, said = run.finish()
    # Python itself has not come far after half a second: then it is ended as any process is.
    assert code == 75 or (seconds < 3 and code in (-signal.SIGTERM, 143)), said
    assert "Traceback" not in said, said


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
    _, said = run.finish()
    # Several ranks have lost the launcher's store as well, without which they can't agree that all is written.
    if grid == (1, 1):
        assert "as asked: it is saved" in said and run.final_state().training_state.step >= 5  # type: ignore[attr-defined]
    else:
        assert "it is saved" not in said and "the ranks' store is gone" in said, said


@pytest.mark.short
def test_a_stopped_rank_is_named_with_its_last_action(faults_data: Path, tmp_path: Path) -> None:
    options: dict[str, object] = {"train.steps": 10**6, "run.timeout": 6, "run.restarts": 0}
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
        # The launcher kills it after a time of grace; a stopped process hears nothing else.
        os.kill(ranks[1], signal.SIGKILL)
    code, said = run.finish()
    assert code == 75, said
    assert re.search(r"rank 0 lost rank 1 \(replica 0, stage 1, last seen [^)]+\) while ", said), said
    assert named < 6 + 3 + 5, f"it took {named:.1f} s"


@pytest.mark.short
def test_a_run_of_one_machine_listens_on_the_loopback_only(faults_data: Path, tmp_path: Path) -> None:
    if shutil.which("ss") is None:
        assert "CI" not in os.environ
        pytest.skip("ss is not here")
    run = TrainProcess(tmp_path / "run", faults_data, (1, 2), {"train.steps": 10**6}).start()
    run.await_step(3)
    assert run.process is not None
    pids = [run.process.pid, *run.ranks(), *(child for pid in run.ranks() for child in children(pid))]
    listed = subprocess.run(["ss", "-lntupH"], capture_output=True, text=True, check=True).stdout.splitlines()
    own = [row for row in listed if any(f"pid={pid}," in row for pid in pids)]
    second = TrainProcess(tmp_path / "run", faults_data, (1, 1), {"run.restarts": 0}).start()
    code, said = second.finish()
    run.process.kill()
    run.finish()
    assert own, listed
    for row in own:
        address = row.split()[4]
        assert address.startswith(("127.", "[::1]", "[::ffff:127.")), row
    # Two runs in one folder: the second is refused, and says who is there.
    assert code == 2 and re.search(r"checkpoints is in use by process \d+ on \S+; wait for that run to end", said), said


@pytest.mark.short
def test_a_full_disk_leaves_the_last_checkpoint_whole(faults_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        assert "CI" not in os.environ
        pytest.skip("only root can mount a small disk")
    try:
        run = TrainProcess(folder / "run", faults_data, (2, 1), {"save.keep": 1000, "run.restarts": 0}).start()
        run.await_step(2 * SAVE_EVERY)
        with (folder / "filler").open("wb") as filler:
            try:
                while True:
                    filler.write(bytes(1 << 16))
                    filler.flush()
            except OSError:
                pass
        code, said = run.finish()
        # The run went on with a warning; what it could not do at its end is an error.
        assert code == 2, said
        assert re.search(r"warning: step \d+ was not saved: .*disk/run.*No space left on device", said), said
        whole = run.final_state()
        assert whole.training_state.step >= SAVE_EVERY  # type: ignore[attr-defined]
        (folder / "filler").unlink()
        code, said = TrainProcess(folder / "run", faults_data, (2, 1)).start().finish()
        assert code == 0 and "resume  after step" in said, said
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        code, said = TrainProcess(folder / "other", faults_data, (1, 1), {"run.restarts": 0}).start().finish()
        assert code == 2 and "run.folder=" in said and "can't be written (Read-only file system)" in said, said
    finally:
        subprocess.run(["umount", str(folder)], check=True)
