"""Launches take over the same checkpoints from each other, one after another, without a lock."""

import time
from pathlib import Path

import pytest

from helpers.train_process import TrainProcess
from stretto.checkpoint.checkpoint import claim_numbers, find_checkpoint
from stretto.checkpoint.storage import open_storage
from stretto.errors import DataError

pytestmark = pytest.mark.faults


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_launches", [pytest.param(5, marks=pytest.mark.short), 40])
def test_each_launch_resumes_from_what_the_one_before_it_saved(
    num_launches: int, faults_data: Path, tmp_path: Path
) -> None:
    """`file://` has no lock, as object storage; every step is saved, and as few as possible are kept."""
    url = f"file://{tmp_path / 'store'}"
    options = {"train.steps": 10**6, "save.every": 1, "save.keep": 1, "save.to": url, "save.verify": False}
    storage = open_storage(url, 10)
    last_step, running = 0, None
    for number in range(num_launches):
        generation = max(claim_numbers(storage), default=0)
        launch = TrainProcess(
            tmp_path / f"run{number}", faults_data, (1, 1), options, {"FSSPEC_FILE_AUTO_MKDIR": "true"}
        ).start()
        until = time.monotonic() + 90
        while max(claim_numbers(storage), default=0) == generation or not find_or_zero(url):
            assert launch.process is not None and launch.process.poll() is None, "".join(launch.lines)
            assert time.monotonic() < until, "it has not claimed or saved"
            time.sleep(0.02)
        if running is not None:
            code, output = running.finish()
            assert code == 76, output
        step = find_or_zero(url)
        assert step >= last_step, "nothing was lost"
        last_step, running = step, launch
    assert running is not None
    running.end()


def find_or_zero(url: str) -> int:
    """Return the step of the newest checkpoint; 0 before the first one."""
    if not open_storage(url, 10).names():
        return 0
    try:
        return find_checkpoint(url).manifest.training_state.step
    except DataError as error:
        if "holds no checkpoint" in str(error):
            return 0
        raise
