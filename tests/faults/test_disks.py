"""The disk of a run is full, or can't be written."""

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.fault_loss import FaultLoss, FaultMeter, LossRecorder, logged_steps
from helpers.small_disk import fill_disk, small_disk
from helpers.train_process import SAVE_EVERY, TrainProcess
from stretto.checkpoint.checkpoint import complete_checkpoint_names, find_checkpoint, read_claims
from stretto.checkpoint.storage import LocalStorage

pytestmark = pytest.mark.faults


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of three megabytes."""
    with small_disk(tmp_path / "disk", megabytes=3) as folder:
        yield folder


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make a folder read-only for all that is opened from now on; root may write to a folder without write access."""
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def newest_step(run: TrainProcess) -> int:
    names = complete_checkpoint_names(LocalStorage(run.folder / "checkpoints"))
    return max((name.step for name in names), default=0)


def await_newer_step(run: TrainProcess, step: int, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while newest_step(run) <= step:
        assert time.monotonic() < until, f"no step after {step} was saved"
        time.sleep(0.02)


def stop(run: TrainProcess) -> tuple[int, str]:
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    return run.finish()


def test_a_run_outlives_a_disk_that_is_full_for_a_while(
    faults_data: Path, disk: Path, record_loss: LossRecorder
) -> None:
    run = TrainProcess(disk / "run", faults_data, (2, 1), {"train.steps": 10**6}).start()
    run.await_checkpoint()
    fill_disk(disk / "filler")
    meter = FaultMeter(disk / "run")
    # For many steps, which are not in the log now.
    time.sleep(4)
    before = newest_step(run)
    (disk / "filler").unlink()
    await_newer_step(run, before)
    loss = meter.await_progress()
    code, output = stop(run)
    assert code == 75 and "as requested; that step is saved" in output, output
    assert re.search(r"warning: step \d+ was not saved: .*disk/run.*No space left on device", output), output
    # There was one launch only, and its steps continued; lines of the log may be missing.
    assert set(read_claims(LocalStorage(disk / "run" / "checkpoints"))) == {1}
    steps = logged_steps(disk / "run")
    assert steps == sorted({*steps}) and steps[-1] == find_checkpoint(disk / "run").manifest.training_state.step
    record_loss(FaultLoss(loss.steps, None))


def test_a_full_disk_leaves_the_last_checkpoint_intact(faults_data: Path, disk: Path) -> None:
    run = TrainProcess(disk / "run", faults_data, (2, 1), {"save.keep": 1000, "run.max_restarts": 0}).start()
    # Fill the disk right after a save: one that is under way would free what it has written when it fails.
    run.await_checkpoint()
    fill_disk(disk / "filler")
    code, output = run.finish()
    # The run continued with a warning; that it could not save at the end is an error.
    assert code == 2, output
    assert re.search(r"warning: step \d+ was not saved: .*disk/run.*No space left on device", output), output
    final_state = run.final_state()
    assert final_state.training_state.step >= SAVE_EVERY  # type: ignore[attr-defined]
    (disk / "filler").unlink()
    code, output = TrainProcess(disk / "run", faults_data, (2, 1)).start().finish()
    assert code == 0 and "resume  after step" in output, output


def test_a_run_outlives_a_disk_that_is_read_only_for_a_while(
    faults_data: Path, disk: Path, record_loss: LossRecorder
) -> None:
    run = TrainProcess(disk / "run", faults_data, (2, 1), {"train.steps": 10**6}).start()
    run.await_checkpoint()
    with read_only(disk / "run" / "checkpoints"):
        meter = FaultMeter(disk / "run")
        loss = meter.await_progress()
        run.await_step(meter.last_step + 20)
        before = newest_step(run)
    await_newer_step(run, before)
    code, output = stop(run)
    assert code == 75 and "as requested; that step is saved" in output, output
    assert re.search(r"warning: step \d+ was not saved: .*disk/run.*Read-only file system", output), output
    steps = logged_steps(disk / "run")
    assert steps == list(range(1, find_checkpoint(disk / "run").manifest.training_state.step + 1))
    record_loss(loss)


def test_a_read_only_disk_at_the_start_is_an_error_that_names_the_folder(faults_data: Path, disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    code, output = TrainProcess(disk / "run", faults_data, (1, 1), {"run.max_restarts": 0}).start().finish()
    assert code == 2 and "run.folder=" in output and "can't be written (Read-only file system)" in output, output
