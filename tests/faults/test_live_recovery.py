"""`stretto train` with live recovery: a rank is killed, the others continue in the same processes."""

import os
import random
import re
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.fault_loss import FaultMeter, LossRecorder, log_lines, logged_losses
from helpers.html_page import ParsedPage
from helpers.slow_process import slow_down
from helpers.train_process import STEPS, TrainProcess, await_exit, children
from stretto.base.units import pluralize
from stretto.checkpoint import find_checkpoint
from stretto.launch.rank_environment import free_port
from stretto.report import render_run

pytestmark = pytest.mark.faults
GRIDS = [(2, 1), (3, 1), (2, 2)]


def start(folder: Path, data: Path, grid: tuple[int, int], **options: object) -> TrainProcess:
    fields = {"run.recovery": "live", "run.copy_every": 5, "run.timeout": 20, **options}
    return TrainProcess(folder, data, grid, fields).start()


def kill_one(run: TrainProcess, seed: int, first_step: int = 3) -> tuple[int, FaultMeter]:
    """Kill a random rank at a random moment, and wait for the process that takes its place; the others still run."""
    generator = random.Random(seed)
    run.await_step(generator.randint(first_step, 20))
    time.sleep(generator.uniform(0, 0.1))
    before = run.ranks()
    victim = generator.randrange(len(before))
    assert run.kill(victim)
    meter = FaultMeter(run.folder)
    deadline = time.monotonic() + 60
    while len(run.ranks()) < len(before) or before[victim] in run.ranks():
        assert time.monotonic() < deadline, "no process takes the place of the one that was killed"
        time.sleep(0.01)
    assert {*before} - {before[victim]} <= {*run.ranks()}
    return victim, meter


def assert_change_is_reported(folder: Path, victim: int, output: str) -> None:
    """One launch that has lost a replica, which has joined again if there was time."""
    lines = list(log_lines(folder / "log.jsonl"))
    assert [(line["generation"], line["step"]) for line in lines if line["kind"] == "start"] == [(1, 0)]
    changes = [line for line in lines if line["kind"] == "rank_change"]
    lost = changes[0]["lost"]
    assert victim in lost and changes[0]["reason"] and all(line["from_memory"] for line in changes)
    assert [(line["lost"], line["joined"]) for line in changes] in ([(lost, [])], [(lost, []), ([], lost)])
    assert output.count("\nranks   lost rank") == 1 and output.count(" joined\n") == len(changes) - 1, output
    counts = f"was launched once; had {pluralize(len(changes), 'change')} of ranks within a launch."
    assert counts in ParsedPage(render_run(folder)).text


@pytest.fixture(scope="module")
def expected(faults_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    run = TrainProcess(tmp_path_factory.mktemp("reference") / "run", faults_data).start()
    code, output = run.finish()
    assert code == 0, output
    return logged_losses(run.folder)


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.short), *range(1, 6)])
def test_survivors_of_a_lost_replica_keep_their_processes(
    seed: int, faults_data: Path, tmp_path: Path, expected: dict[int, float], record_loss: LossRecorder
) -> None:
    run = start(tmp_path / "run", faults_data, GRIDS[seed % len(GRIDS)])
    victim, meter = kill_one(run, seed)
    record_loss(meter.await_progress(after_change=True))
    code, output = run.finish()
    assert code == 0, output
    assert f"rank {victim} was killed by SIGKILL; the others continue" in output
    assert re.search(rf"rank {victim} is started again as process \d+\n", output), output
    assert "stretto: error" not in output, "not even by a process that comes too late"
    assert_change_is_reported(run.folder, victim, output)
    assert logged_losses(run.folder) == pytest.approx(expected, rel=1e-3), "in float32"
    assert find_checkpoint(run.folder).manifest.training_state.step == STEPS


@pytest.mark.parametrize("seed", range(3))
def test_a_lost_stage_resumes_from_the_memory_of_another_rank(
    seed: int, faults_data: Path, tmp_path: Path, record_loss: LossRecorder
) -> None:
    """Without replicas: all ranks go back to the last copy. They repeat its steps with the same bits."""
    reference = start(tmp_path / "reference", faults_data, (1, 2))
    code, output = reference.finish()
    assert code == 0, output
    run = start(tmp_path / "run", faults_data, (1, 2), **{"save.every": 1000})
    # Before step 10 is copied, the copies of step 5 have arrived.
    _, meter = kill_one(run, seed, first_step=11)
    record_loss(meter.await_progress(after_change=True))
    code, output = run.finish()
    assert code == 0, output
    assert "from the ranks' memory" in output, output
    changes = [line for line in log_lines(run.folder / "log.jsonl") if line["kind"] == "rank_change"]
    assert all(line["from_memory"] and line["step"] in range(5, STEPS, 5) for line in changes), changes
    assert logged_losses(run.folder) == logged_losses(reference.folder)
    assert run.final_state() == reference.final_state()


# With replicas, the other one trains on meanwhile, so the run has to last for half a minute.
@pytest.mark.parametrize(("grid", "steps"), [((1, 2), 400), ((2, 1), 2000)])
def test_a_stopped_rank_is_killed_and_replaced(
    grid: tuple[int, int], steps: int, faults_data: Path, tmp_path: Path
) -> None:
    """SIGSTOP: the process does not end by itself, and does not come when the others meet."""
    fields = {"run.timeout": 6, "train.steps": steps, "save.every": steps}
    run = start(tmp_path / "run", faults_data, grid, **fields)
    run.await_step(10)
    _, stopped = run.ranks()
    os.kill(stopped, signal.SIGSTOP)
    try:
        await_exit(stopped, 120)
        code, output = run.finish(400)
    finally:
        with suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGKILL)
    assert code == 0, output
    assert f"rank 1 hangs, so its process {stopped} is killed" in output, output
    assert re.search(r"rank 1 is started again as process \d+\n", output), output
    assert find_checkpoint(run.folder).manifest.training_state.step == steps


def test_a_rank_that_pauses_for_less_than_the_timeout_is_not_killed(faults_data: Path, tmp_path: Path) -> None:
    run = start(tmp_path / "run", faults_data, (2, 1), **{"run.timeout": 12})
    run.await_step(10)
    paused = run.ranks()[1]
    os.kill(paused, signal.SIGSTOP)
    time.sleep(5)
    os.kill(paused, signal.SIGCONT)
    code, output = run.finish()
    assert code == 0 and "is killed" not in output and "is started again" not in output, output


def test_a_launch_ends_if_a_rank_hangs_and_no_restarts_are_left(faults_data: Path, tmp_path: Path) -> None:
    fields = {"run.timeout": 6, "run.max_restarts": 0, "train.steps": 10**6}
    run = start(tmp_path / "run", faults_data, (1, 2), **fields)
    run.await_step(10)
    stopped = run.ranks()[1]
    os.kill(stopped, signal.SIGSTOP)
    try:
        code, output = run.finish(180)
    finally:
        with suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGKILL)
    assert code == 75, output
    assert "rank 1 did not answer within run.timeout and was killed, no restarts are left" in output, output


def test_a_lost_host_of_the_store_is_replaced_by_another(
    faults_data: Path, tmp_path: Path, expected: dict[int, float], record_loss: LossRecorder
) -> None:
    """One torchrun per replica; the first, which hosts the key-value store, is killed with its rank and stays away."""
    ports = [free_port() for _ in range(3)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "GLOO_SOCKET_IFNAME": "lo",
        "STRETTO_SECRET": secrets.token_hex(16),
        "STRETTO_HOSTS": ",".join(f"127.0.0.1:{port}" for port in ports),
    }
    fields = {"run.recovery": "live", "run.timeout": 20}
    run = TrainProcess(tmp_path / "run", faults_data, (3, 1), fields)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--max-restarts=3"]
    launchers = [
        subprocess.Popen(
            [*torchrun, f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-backend=c10d", "-m", *run.command()[2:]],
            env={**environment, "STRETTO_REPLICA": str(replica)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for replica in range(3)
    ]  # fmt: skip
    try:
        run.process = launchers[0]
        run.await_step(8)
        for pid in [launchers[0].pid, *children(launchers[0].pid)]:
            os.kill(pid, signal.SIGKILL)
        record_loss(FaultMeter(run.folder).await_progress(after_change=True))
        outputs = [launcher.communicate(timeout=120)[0] for launcher in launchers[1:]]
        assert [launcher.returncode for launcher in launchers[1:]] == [0, 0], outputs
    finally:
        for launcher in launchers:
            for pid in [launcher.pid, *children(launcher.pid)] if launcher.poll() is None else []:
                os.kill(pid, signal.SIGKILL)
            launcher.communicate()
    assert logged_losses(run.folder) == pytest.approx(expected, rel=1e-3)


def test_a_straggler_is_replaced(faults_data: Path, tmp_path: Path) -> None:
    """A rank of three gets a fifth of its core; its process is replaced, and the other two keep theirs."""
    fields = {"run.log_every": 5, "sentinel.replace_straggler": "true", "train.steps": 10**6}
    run = start(tmp_path / "run", faults_data, (3, 1), **fields)
    run.await_step(10)
    before = run.ranks()
    with slow_down(before[1]):
        deadline = time.monotonic() + 120
        while before[1] in run.ranks():
            assert time.monotonic() < deadline, "the straggler was not replaced"
            time.sleep(0.1)
    while not (joined := [line["joined"] for line in log_lines(run.folder / "log.jsonl") if line.get("joined")]):
        assert time.monotonic() < deadline, "no process has taken the place of the straggler"
        time.sleep(0.1)
    after = run.ranks()
    assert len(after) == 3 and {*before} & {*after} == {before[0], before[2]}
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    code, output = run.finish()
    assert code == 75, output
    (slot,) = joined[0]
    assert f"rank {slot} slowed down all others, so it makes way for another" in output
    assert f"rank {slot} joined" in output


def test_preemption_saves_a_run_with_live_recovery(faults_data: Path, tmp_path: Path) -> None:
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
    assert len(logged_losses(run.folder)) == STEPS


def test_a_run_from_another_checkpoint_keeps_its_own_after_a_change_of_ranks(faults_data: Path, tmp_path: Path) -> None:
    """Started again with the same `--resume PATH`, it builds on what it has saved, as without a change of ranks."""
    code, output = TrainProcess(tmp_path / "first", faults_data, options={"train.steps": 5}).start().finish()
    assert code == 0, output
    run = TrainProcess(
        tmp_path / "run", faults_data, (2, 1), {"run.recovery": "live", "run.timeout": 20},
        arguments=["--resume", str(tmp_path / "first")],
    ).start()  # fmt: skip
    kill_one(run, 0)
    code, output = run.finish()
    assert code == 0, output
    code, output = run.start().finish()
    assert code == 0 and f"already done, at step {STEPS}" in output, output


def test_a_mistake_ends_all_ranks_of_a_run_with_live_recovery(faults_data: Path, tmp_path: Path) -> None:
    """A learning rate that makes the loss infinite: one error, exit code 2, no restart."""
    run = start(tmp_path / "run", faults_data, (2, 1), **{"train.lr": 1e30})
    code, output = run.finish()
    assert code == 2, output
    assert output.count("stretto: error") == 1, output
