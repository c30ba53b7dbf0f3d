"""Ranks that are alive but too slow: stopped (SIGSTOP), and slowed down."""

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.fault_loss import FaultLoss, FaultMeter, LossRecorder, log_lines, logged_steps
from helpers.slow_process import slow_down
from helpers.train_process import ReferenceRuns, TrainProcess

pytestmark = pytest.mark.faults


def test_a_stopped_rank_is_named_with_its_last_action_and_replaced(
    faults_data: Path, tmp_path: Path, record_loss: LossRecorder
) -> None:
    options: dict[str, object] = {"train.steps": 10**6, "run.timeout": 6}
    run = TrainProcess(tmp_path / "run", faults_data, (1, 2), options).start()
    run.await_step(5)
    ranks = run.ranks()
    time.sleep(1.5)
    os.kill(ranks[1], signal.SIGSTOP)
    meter = FaultMeter(tmp_path / "run")
    stopped = time.monotonic()
    try:
        while Path(f"/proc/{ranks[0]}").exists() and time.monotonic() - stopped < 60:
            time.sleep(0.1)
        named = time.monotonic() - stopped
        # The launcher kills the stopped rank, which handles no other signal, after 30 s.
        record_loss(meter.await_progress())
        assert not Path(f"/proc/{ranks[1]}").exists()
    finally:
        with suppress(ProcessLookupError):
            os.kill(ranks[1], signal.SIGKILL)
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    code, output = run.finish()
    assert code == 75, output
    assert re.search(r"rank 0 lost rank 1 \(replica 0, stage 1, last seen [^)]+\) while ", output), output
    assert named < 6 + 3 + 5, f"it took {named:.1f} s"
    steps = logged_steps(tmp_path / "run")
    assert steps == list(range(1, len(steps) + 1))


def test_a_slow_rank_is_named_in_the_log_and_does_not_change_the_result(
    reference_runs: ReferenceRuns, faults_data: Path, tmp_path: Path, record_loss: LossRecorder
) -> None:
    expected = reference_runs[3, 1]
    run = TrainProcess(tmp_path / "run", faults_data, (3, 1), {"run.log_every": 5}).start()
    run.await_step(5)
    started = time.monotonic()
    with slow_down(run.ranks()[1]):
        code, output = run.finish()
    ended = time.monotonic()
    assert code == 0 and "restarting" not in output, output
    assert run.final_state() == expected
    stragglers = [line["straggler"] for line in log_lines(tmp_path / "run" / "log.jsonl") if line.get("straggler")]
    assert stragglers and {straggler["rank"] for straggler in stragglers} == {1}, output
    # What the slow rank has cost per step, by the run's own account, in the five steps of each report.
    seconds = sum(5 * straggler["seconds"] for straggler in stragglers)
    assert 0 < seconds < ended - started
    record_loss(FaultLoss(0, seconds))
