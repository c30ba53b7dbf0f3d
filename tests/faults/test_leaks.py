"""Many restarts in a row: no process, port, descriptor, shared memory or file is left over."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from helpers.train_process import TrainProcess

pytestmark = pytest.mark.faults


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def ports(pids: list[int]) -> int:
    listed = subprocess.run(["ss", "-lntupH"], capture_output=True, text=True, check=True).stdout.splitlines()
    return sum(any(f"pid={pid}," in row for pid in pids) for row in listed)


def shared_memory() -> set[str]:
    return {str(path) for path in Path("/dev/shm").iterdir()}


@pytest.mark.timeout(900)
def test_restarts_leave_nothing_behind(faults_data: Path, tmp_path: Path) -> None:
    num_restarts = 40
    before = shared_memory()
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    options: dict[str, object] = {"run.max_restarts": 10**6, "train.steps": 10**6, "data.workers": 1}
    # Importing a part of torch creates this cache, one per user; by default it is in the temporary folder too.
    environment = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    run = TrainProcess(tmp_path / "run", faults_data, (2, 1), options, environment).start()
    assert run.process is not None
    launcher = run.process.pid
    generator = random.Random(1)
    seen: set[int] = set()
    counts: list[tuple[int, int, int]] = []
    for number in range(num_restarts + 1):
        ranks = await_new_ranks(run, seen)
        seen |= set(ranks)
        # Some are killed while they start, some while they train and save. The first and last are counted while they
        # train: starting ranks have fewer connections to the launcher.
        if 0 < number < num_restarts:
            time.sleep(generator.uniform(0.0, 4.0))
        else:
            await_steps(tmp_path / "run" / "log.jsonl")
        counts.append((open_files(launcher), threads(launcher), ports([launcher])))
        if number < num_restarts:
            os.kill(ranks[generator.randrange(2)], signal.SIGKILL)
    run.process.send_signal(signal.SIGTERM)
    code, output = run.finish()
    assert code in (75, 143), output
    assert output.count("restarting all ranks") == num_restarts
    assert not [pid for pid in seen if Path(f"/proc/{pid}").exists()]
    first, last = counts[0], counts[-1]
    assert last[0] <= first[0] + 2 and last[1] <= first[1] + 2 and last[2] <= max(first[2], 1), counts
    assert list(temporary.iterdir()) == []
    assert_nothing_stays(before)


def assert_nothing_stays(before: set[str]) -> None:
    """Other tests that run meanwhile have shared memory too, but only for a while; a leak stays."""
    remaining = shared_memory() - before
    until = time.monotonic() + 60
    while remaining and time.monotonic() < until:
        time.sleep(0.5)
        remaining &= shared_memory()
    assert remaining == set()


def await_steps(log: Path) -> None:
    """Wait until the ranks that run now have logged something: they train, so they are connected to the launcher."""
    until, size = time.monotonic() + 120, log.stat().st_size if log.exists() else 0
    while time.monotonic() < until:
        if log.exists() and log.stat().st_size > size:
            time.sleep(1.0)
            return
        time.sleep(0.1)
    raise AssertionError("the ranks did not train")


def await_new_ranks(run: TrainProcess, seen: set[int]) -> list[int]:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        ranks = run.ranks()
        if len(ranks) == 2 and not seen & set(ranks):
            return ranks
        time.sleep(0.02)
    raise AssertionError("the ranks were not restarted")
