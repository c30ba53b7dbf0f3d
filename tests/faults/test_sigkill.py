"""SIGKILL of a random rank at a random moment: the run ends by itself, bitwise as if nothing had happened."""

import random
import time
from pathlib import Path

import pytest

from helpers.train_process import ReferenceRuns, TrainProcess

GRIDS = [(1, 1), (2, 1), (1, 2), (2, 2)]
# The seeds that CI runs.
SHORT = (2,)


@pytest.mark.faults
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.short] if seed in SHORT else []) for seed in range(20)]
)
def test_a_killed_rank_changes_nothing(
    seed: int, reference_runs: ReferenceRuns, faults_data: Path, tmp_path: Path
) -> None:
    grid = GRIDS[seed % len(GRIDS)]
    expected = reference_runs[grid]
    chance = random.Random(seed)
    run = TrainProcess(tmp_path / "run", faults_data, grid).start()
    victim = chance.randrange(grid[0] * grid[1])
    if chance.random() < 0.25:
        # While the ranks start.
        time.sleep(chance.uniform(0.5, 6))
    else:
        run.await_step(chance.randint(1, 55))
        time.sleep(chance.uniform(0, 0.1))
    was_killed = run.kill(victim)
    code, said = run.finish()
    assert code == 0, said
    assert "was killed by SIGKILL; all ranks are started again" in said or not was_killed, said
    assert run.final_state() == expected
    assert (tmp_path / "run" / "weights.safetensors").is_file()
    log = (tmp_path / "run" / "log.jsonl").read_text()
    assert [log.count(f'"kind": "step", "step": {step},') for step in range(1, 61)] == [1] * 60
