"""A rank that is lost while the others' main threads are blocked in C++, as with NCCL: it is named, and all end."""

import os
import pickle
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from helpers.rank_pool import RankPool, RanksFailedError
from stretto import World
from stretto.launch.rank_environment import free_port
from stretto.mesh.join import BACKEND_VARIABLE
from stretto.mesh.strict import STRICT

TIMEOUT = timedelta(seconds=10)


def wait_for(world: World, absent: int, folder: Path) -> None:
    """Wait for all ranks; one of them never comes."""
    # A signal handler must not be what ends a rank.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(99))
    (folder / str(world.rank)).touch()
    if world.rank == absent:
        time.sleep(120)
    world.barrier()


@pytest.mark.parametrize(
    "fault",
    [signal.SIGKILL, *(pytest.param(fault, marks=pytest.mark.long) for fault in (signal.SIGSTOP, None))],
    ids=["killed", "frozen", "slow"],
)
def test_ranks_that_wait_for_a_lost_rank_name_it_and_end(
    fault: signal.Signals | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, STRICT)
    ranks, absent = RankPool(3, TIMEOUT), 1
    process = ranks.processes[absent]
    ranks._wait_until_started()

    for pipe in ranks.pipes:
        pipe.send_bytes(pickle.dumps((wait_for, (absent, tmp_path))))
    while len(list(tmp_path.iterdir())) < len(ranks.pipes):
        time.sleep(0.05)
    time.sleep(1)  # until the others are in the barrier
    for rank in {0, 1, 2} - {absent}:
        # Their main threads are blocked, so this handler never runs.
        os.kill(ranks.processes[rank].pid or 0, signal.SIGTERM)
    if fault is not None:
        os.kill(process.pid or 0, fault)
    started = time.monotonic()
    others = [ranks.processes[rank] for rank in (0, 2)]
    for other in others:
        other.join(60)
    seconds = time.monotonic() - started
    ranks.close()
    assert [other.exitcode for other in others] == [75, 75]
    # A broken connection is noticed at once, silence only after the timeout.
    assert seconds < (TIMEOUT.total_seconds() if fault == signal.SIGKILL else TIMEOUT.total_seconds() + 8)
    lines = [line for line in capfd.readouterr().err.splitlines() if "stretto: error" in line]
    # The first rank that gives up on a slow one tells the others.
    verbs = ("lost",) if fault == signal.SIGKILL else ("lost", "gave up on")
    for rank in (0, 2):
        assert any(f"rank {rank} {verb} rank 1" in line for line in lines for verb in verbs), lines


def fail(world: World) -> None:
    from stretto.base.errors import ConfigError

    if world.rank == 1:
        raise ConfigError("this rank has found a mistake; fix it")
    world.barrier()


def test_an_error_of_one_rank_ends_ranks_that_are_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, STRICT)
    ranks = RankPool(2, TIMEOUT)
    with pytest.raises(RanksFailedError) as caught:
        ranks.run(fail, seconds=15)
    assert caught.value.errors[1].startswith("this rank has found a mistake")
    assert caught.value.errors[0].startswith("ended with code")


SCRIPT = """
import os, sys, time
from datetime import timedelta
import stretto
from stretto.errors import ConfigError

with stretto.world(device="cpu", timeout=timedelta(seconds=100)) as world:
    world.barrier()
    {body}
"""


def run_script(body: str, size: int = 3) -> list[tuple[int, str]]:
    """Run a user's own script on some ranks of the strict backend; return each rank's exit code and stderr."""
    variables = {
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "STRETTO_SECRET": "only for this test", BACKEND_VARIABLE: STRICT,
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT.format(body=body)],
            env={**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [process.communicate(timeout=90)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


@pytest.mark.long
@pytest.mark.short
def test_a_rank_that_ends_with_a_plain_exception_is_named_at_once() -> None:
    results = run_script("if world.rank == 1: raise RuntimeError('out of memory')\n    world.barrier()")
    assert [code for code, _ in results] == [75, 1, 75], results
    for rank in (0, 2):
        assert f"rank {rank} lost rank 1" in results[rank][1]


@pytest.mark.long
def test_ranks_end_well_at_different_times() -> None:
    """Once a thread was left waiting for the next rank, and aborted a process that ended before that rank did."""
    body = "time.sleep(0.7 * world.rank)\nclass Slow:\n    def __del__(self): time.sleep(1.5)\nslow = Slow()"
    results = run_script(body)
    assert [code for code, _ in results] == [0, 0, 0], results


@pytest.mark.long
def test_a_rank_without_anyone_to_read_its_output_ends_too() -> None:
    body = "os.close(2) if world.rank == 0 else None\n    os._exit(3) if world.rank == 1 else world.barrier()"
    assert [code for code, _ in run_script(body)] == [75, 3, 75]
