"""Object storage that holds the data and the checkpoints of a run is killed and restarted."""

import re
import signal
import time
from pathlib import Path

import pytest
from s3fs import S3FileSystem

from helpers.fault_loss import FaultMeter, LossRecorder, logged_steps
from helpers.s3_server import s3_server
from helpers.train_process import TrainProcess
from stretto.checkpoint.checkpoint import find_checkpoint, read_claims
from stretto.checkpoint.storage import open_storage

pytestmark = [pytest.mark.faults, pytest.mark.s3]
URL = "s3://bucket/run"


def test_a_run_waits_for_object_storage_that_is_down(
    faults_data: Path, tmp_path: Path, record_loss: LossRecorder
) -> None:
    with s3_server(tmp_path / "server") as server:
        S3FileSystem().put(f"{faults_data}/", "s3://bucket/data/", recursive=True)
        options: dict[str, object] = {"data.train": "s3://bucket/data", "save.to": URL, "train.steps": 10**6}
        environment = {**server.environment, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        run = TrainProcess(tmp_path / "run", faults_data, (2, 1), options, environment).start()
        run.await_step(30)
        # In the middle of its saves: one begins every few steps.
        server.stop()
        time.sleep(1)
        meter = FaultMeter(tmp_path / "run")
        time.sleep(5)
        # A save waits for the server, and the next one for that save.
        assert logged_steps(tmp_path / "run")[-1] == meter.last_step
        server.start()
        loss = meter.await_progress()
        run.await_step(meter.last_step + 30)
        assert run.process is not None
        run.process.send_signal(signal.SIGTERM)
        code, output = run.finish()
        assert code == 75 and "as requested; that step is saved" in output, output
        assert set(read_claims(open_storage(URL))) == {1}, "one launch, without a restart"
        saved_step = find_checkpoint(URL).manifest.training_state.step
    assert logged_steps(tmp_path / "run") == list(range(1, saved_step + 1))
    record_loss(loss)


def test_a_run_without_object_storage_at_its_start_says_so_in_one_sentence(faults_data: Path, tmp_path: Path) -> None:
    with s3_server(tmp_path / "server") as server:
        server.stop()
        options: dict[str, object] = {"save.to": URL, "data.retry_seconds": 2}
        run = TrainProcess(tmp_path / "run", faults_data, (2, 1), options, server.environment).start()
        code, output = run.finish()
        server.start()
    assert code == 2 and output.count("stretto: error") == 1, output
    assert re.search(rf"{URL}\S* can't be accessed after \d+ s of retries", output), output
