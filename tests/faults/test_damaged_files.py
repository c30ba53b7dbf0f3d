"""Files that change on disk between two launches: a page of the data, a checkpoint, and the end of the log."""

import json
import os
import re
import resource
import signal
import time
from pathlib import Path

import pytest

from helpers.fault_loss import FaultMeter, LossRecorder, logged_steps
from helpers.paged_store import flip_bit
from helpers.train_process import SAVE_EVERY, STEPS, ReferenceRuns, TrainProcess
from stretto.checkpoint.checkpoint import complete_checkpoint_names, find_checkpoint
from stretto.checkpoint.storage import LocalStorage

pytestmark = pytest.mark.faults
GRID = (2, 1)


def kill_all(run: TrainProcess) -> None:
    """Kill the launcher and all ranks at once, as a power cut does."""
    assert run.process is not None
    for pid in [run.process.pid, *run.ranks()]:
        os.kill(pid, signal.SIGKILL)
    run.finish()


def test_a_damaged_page_of_the_data_is_named_and_no_step_is_lost(
    reference_runs: ReferenceRuns, faults_data: Path, tmp_path: Path, record_loss: LossRecorder
) -> None:
    expected = reference_runs[GRID]
    run = TrainProcess(tmp_path / "run", faults_data, GRID).start()
    run.await_step(20)
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    assert run.finish()[0] == 75
    page = max(faults_data.glob("*.bin"), key=lambda path: path.stat().st_size)
    flip_bit(page, 1000)
    meter = FaultMeter(tmp_path / "run")
    try:
        code, output = TrainProcess(tmp_path / "run", faults_data, GRID).start().finish()
    finally:
        flip_bit(page, 1000)
    assert code == 2 and output.count("stretto: error") == 1, output
    assert re.search(rf"{page} is damaged between bytes 0 and [\d,]+ \(checksum mismatch\)", output), output
    run.start()
    record_loss(meter.await_progress())
    code, output = run.finish()
    assert code == 0, output
    assert run.final_state() == expected


def test_a_damaged_checkpoint_is_named_and_the_one_before_gives_the_same_result(
    reference_runs: ReferenceRuns, faults_data: Path, tmp_path: Path, record_loss: LossRecorder
) -> None:
    expected = reference_runs[GRID]
    run = TrainProcess(tmp_path / "run", faults_data, GRID).start()
    run.await_step(3 * SAVE_EVERY)
    kill_all(run)
    earlier, newest = sorted(complete_checkpoint_names(LocalStorage(tmp_path / "run" / "checkpoints")))[-2:]
    shard = tmp_path / "run" / "checkpoints" / str(newest) / "rank-00001.safetensors"
    flip_bit(shard, shard.stat().st_size // 2)
    meter = FaultMeter(tmp_path / "run")
    code, output = run.start().finish()
    assert code == 2 and output.count("stretto: error") == 1, output
    assert re.search(rf"{newest}/{shard.name} is damaged .*; resume from a different checkpoint", output), output
    run.arguments = ["--resume", str(tmp_path / "run" / "checkpoints" / str(earlier))]
    run.start()
    record_loss(meter.await_progress())
    code, output = run.finish()
    assert code == 0 and f"resume  after step {earlier.step}" in output, output
    assert run.final_state() == expected
    assert logged_steps(tmp_path / "run") == list(range(1, STEPS + 1))


def test_a_log_whose_last_line_is_torn_continues_with_each_step_once(
    reference_runs: ReferenceRuns, faults_data: Path, tmp_path: Path, record_loss: LossRecorder
) -> None:
    expected = reference_runs[GRID]
    run = TrainProcess(tmp_path / "run", faults_data, GRID).start()
    run.await_step(20)
    log = tmp_path / "run" / "log.jsonl"
    # The kernel writes a line up to this limit, in the middle of the third line from now, and no further.
    content = log.read_bytes()
    limit = len(content) + 5 * len(content.splitlines()[-1]) // 2
    resource.prlimit(run.ranks()[0], resource.RLIMIT_FSIZE, (limit, limit))
    until = time.monotonic() + 60
    while log.stat().st_size < limit:
        assert time.monotonic() < until, "the log was not torn"
        time.sleep(0.005)
    kill_all(run)
    content = log.read_bytes()
    assert len(content) == limit and not content.endswith(b"\n")
    meter = FaultMeter(tmp_path / "run")
    run = TrainProcess(tmp_path / "run", faults_data, GRID).start()
    loss = meter.await_progress()
    code, output = run.finish()
    assert code == 0, output
    assert run.final_state() == expected
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, STEPS + 1))
    assert find_checkpoint(tmp_path / "run").manifest.training_state.step == STEPS
    record_loss(loss)
