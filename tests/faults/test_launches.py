"""The launcher is killed, or started twice at the same time."""

import re
import signal
import time
from pathlib import Path

import pytest
from s3fs import S3FileSystem

from helpers.fault_loss import FaultMeter, LossRecorder, logged_steps
from helpers.s3_server import s3_server
from helpers.train_process import TrainProcess, is_running
from stretto.checkpoint.checkpoint import find_checkpoint, lineage_names, read_claims
from stretto.checkpoint.storage import LocalStorage, open_storage

pytestmark = pytest.mark.faults
ENDLESS: dict[str, object] = {"train.steps": 10**6}


@pytest.mark.parametrize(
    ("grid", "save_every"),
    [((1, 1), 10**6), pytest.param((2, 1), 10**6, marks=pytest.mark.short), ((2, 1), 1)],
    ids=["single rank", "two ranks", "two ranks that save all the time"],
)
def test_ranks_do_not_outlive_their_launcher(
    grid: tuple[int, int], save_every: int, faults_data: Path, tmp_path: Path, record_loss: LossRecorder
) -> None:
    options = {**ENDLESS, "save.every": save_every}
    run = TrainProcess(tmp_path / "run", faults_data, grid, options).start()
    run.await_step(20)
    ranks = run.ranks()
    assert len(ranks) == grid[0] * grid[1] and run.process is not None
    run.process.kill()
    run.process.wait()
    killed, step_when_killed = time.monotonic(), logged_steps(tmp_path / "run")[-1]
    while any(map(is_running, ranks)):
        assert time.monotonic() < killed + 10, "the ranks did not end"
        time.sleep(0.05)
    _, output = run.finish()
    meter = FaultMeter(tmp_path / "run", killed)
    # Several ranks have lost the launcher's store too, without which they can't agree that all shards are written.
    if grid == (1, 1):
        assert "as requested; that step is saved" in output, output
        assert run.final_state().training_state.step == meter.last_step  # type: ignore[attr-defined]
    else:
        assert output.count("stretto: ") == 1, output
        assert "has ended without its ranks, so they stop; start it again" in output, output
        # The step under way, and one that was not in the log yet: no step that can't be saved is taken.
        assert meter.last_step <= step_when_killed + 2
    resumed = TrainProcess(tmp_path / "run", faults_data, grid, ENDLESS).start()
    loss = meter.await_progress()
    if grid == (1, 1) or save_every == 1:  # the others have saved nothing
        record_loss(loss)
    check_stops_and_log(resumed)


def test_of_two_launches_at_once_one_is_refused(faults_data: Path, tmp_path: Path, record_loss: LossRecorder) -> None:
    launches = [TrainProcess(tmp_path / "run", faults_data, (2, 1), ENDLESS).start() for _ in range(2)]
    refused, winner = await_first_end(launches)
    meter = FaultMeter(tmp_path / "run")
    code, output = refused.finish()
    assert code == 2 and re.search(r"is in use by process \d+ on \S+; wait for that run to end", output), output
    record_loss(meter.await_progress())
    check_stops_and_log(winner)
    assert set(read_claims(LocalStorage(tmp_path / "run" / "checkpoints"))) == {1}


@pytest.mark.s3
def test_of_two_launches_that_share_only_object_storage_the_later_takes_over(
    faults_data: Path, tmp_path: Path, record_loss: LossRecorder
) -> None:
    options = {**ENDLESS, "save.to": "s3://bucket/twice"}
    with s3_server(tmp_path / "server") as server:
        launches = [
            TrainProcess(tmp_path / name, faults_data, (2, 1), options, server.environment).start()
            for name in ("first", "second")
        ]
        replaced, winner = await_first_end(launches)
        code, output = replaced.finish()
        assert code == 76 and re.search(r"generation \d of this run has taken over, so this one", output), output
        meter = FaultMeter(winner.folder)
        record_loss(meter.await_progress())
        assert winner.process is not None
        winner.process.send_signal(signal.SIGTERM)
        code, output = winner.finish()
        assert code == 75, output
        storage = open_storage("s3://bucket/twice", 10)
        assert max(read_claims(storage)) >= 2
        # What the replaced launch saved before the other began is its beginning, or does not count.
        line = lineage_names(storage)
        assert line[0].generation >= 2
        assert find_checkpoint("s3://bucket/twice").manifest.training_state.step == line[0].step
        S3FileSystem.clear_instance_cache()


def await_first_end(launches: list[TrainProcess], seconds: float = 120) -> tuple[TrainProcess, TrainProcess]:
    """Wait until one of two launches has ended; return it and the other."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for ended, other in (launches, launches[::-1]):
            assert ended.process is not None
            if ended.process.poll() is not None:
                return ended, other
        time.sleep(0.05)
    raise AssertionError("both launches are still running")


def check_stops_and_log(run: TrainProcess) -> None:
    """Preempt a run; check that it saves its last step, and that no step is missing in its log or there twice."""
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    code, output = run.finish()
    assert code == 75 and "as requested; that step is saved" in output, output
    saved_step = find_checkpoint(run.folder).manifest.training_state.step
    assert logged_steps(run.folder) == list(range(1, saved_step + 1))
