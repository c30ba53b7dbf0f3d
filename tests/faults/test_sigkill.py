"""SIGKILL of a random rank at a random time: the run recovers and ends with bitwise the same result."""

import random
import time
from pathlib import Path

import pytest

from helpers.fault_loss import FaultMeter, LossRecorder
from helpers.train_process import STEPS, ReferenceRuns, TrainProcess

GRIDS = [(1, 1), (2, 1), (1, 2), (2, 2)]
# The seeds that CI runs.
SHORT = (2,)


@pytest.mark.faults
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.short] if seed in SHORT else []) for seed in range(20)]
)
def test_a_killed_rank_does_not_change_the_result(
    seed: int, reference_runs: ReferenceRuns, faults_data: Path, tmp_path: Path, record_loss: LossRecorder
) -> None:
    grid = GRIDS[seed % len(GRIDS)]
    expected = reference_runs[grid]
    generator = random.Random(seed)
    run = TrainProcess(tmp_path / "run", faults_data, grid).start()
    victim = generator.randrange(grid[0] * grid[1])
    if generator.random() < 0.25:
        # While the ranks start.
        time.sleep(generator.uniform(0.5, 6))
    else:
        run.await_step(generator.randint(1, 55))
        time.sleep(generator.uniform(0, 0.1))
    was_killed = run.kill(victim)
    meter = FaultMeter(tmp_path / "run")
    if was_killed and 0 < meter.last_step < STEPS - 5:
        record_loss(meter.await_progress(after_change=True))
    code, output = run.finish()
    assert code == 0, output
    assert "was killed by SIGKILL; restarting all ranks" in output or not was_killed, output
    assert run.final_state() == expected
    assert (tmp_path / "run" / "weights.safetensors").is_file()
    log = (tmp_path / "run" / "log.jsonl").read_text()
    assert [log.count(f'"kind": "step", "step": {step},') for step in range(1, 61)] == [1] * 60
