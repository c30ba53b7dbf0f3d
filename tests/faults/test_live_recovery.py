"""`stretto train` with live recovery: a rank is killed, the others continue in the same processes."""

import json
import random
import signal
import time
from pathlib import Path

import pytest

from helpers.train_process import STEPS, TrainProcess
from stretto.checkpoint import find_checkpoint

GRIDS = [(2, 1), (3, 1), (2, 2), (1, 2)]


def losses(folder: Path) -> dict[int, float]:
    """Return the losses in a log, by step; each step must be in it once."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    return {line["step"]: line["loss"] for line in steps}


def start(folder: Path, data: Path, grid: tuple[int, int], **options: object) -> TrainProcess:
    fields = {"run.recovery": "live", "run.copy_every": 5, "run.timeout": 20, **options}
    return TrainProcess(folder, data, grid, fields).start()


@pytest.fixture(scope="module")
def expected(faults_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    run = TrainProcess(tmp_path_factory.mktemp("reference") / "run", faults_data).start()
    code, output = run.finish()
    assert code == 0, output
    return losses(run.folder)


@pytest.mark.faults
@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.short), *range(1, 8)])
def test_survivors_keep_their_processes(
    seed: int, faults_data: Path, tmp_path: Path, expected: dict[int, float]
) -> None:
    grid, generator = GRIDS[seed % len(GRIDS)], random.Random(seed)
    run = start(tmp_path / "run", faults_data, grid)
    run.await_step(generator.randint(3, 20))
    time.sleep(generator.uniform(0, 0.1))
    before = run.ranks()
    victim = generator.randrange(len(before))
    assert run.kill(victim)
    deadline = time.monotonic() + 60
    while len(run.ranks()) < len(before) or before[victim] in run.ranks():
        assert time.monotonic() < deadline, "no process takes the place of the one that was killed"
        time.sleep(0.01)
    assert {*before} - {before[victim]} <= {*run.ranks()}
    code, output = run.finish()
    assert code == 0, output
    assert f"rank {victim} was killed by SIGKILL; the others continue" in output
    assert losses(run.folder) == pytest.approx(expected, rel=1e-3)
    assert find_checkpoint(run.folder).manifest.training_state.step == STEPS
    if grid == (1, 2):
        assert "from the ranks' memory" in output, "not from a checkpoint"


@pytest.mark.faults
@pytest.mark.short
def test_preemption(faults_data: Path, tmp_path: Path) -> None:
    """SIGTERM to the launcher: all ranks save the same step, and the next launch resumes from it."""
    run = start(tmp_path / "run", faults_data, (2, 1))
    run.await_step(10)
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    code, output = run.finish()
    assert code == 75, output
    assert "that step is saved" in output
    again = start(tmp_path / "run", faults_data, (2, 1))
    code, output = again.finish()
    assert code == 0, output
    losses(run.folder)


@pytest.mark.faults
def test_mistake_ends_all_ranks(faults_data: Path, tmp_path: Path) -> None:
    """A learning rate that makes the loss infinite: one error, exit code 2, no restart."""
    run = start(tmp_path / "run", faults_data, (2, 1), **{"train.lr": 1e30})
    code, output = run.finish()
    assert code == 2, output
    assert output.count("stretto: error") == 1, output
