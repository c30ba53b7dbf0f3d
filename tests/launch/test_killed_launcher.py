"""What ranks do when the process that has started them is killed: they end with a message, and with exit code 75."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.output import without_gloo_lines
from stretto.launch.rank_environment import free_port
from stretto.mesh.launch_info import find_launch_info
from stretto.mesh.launcher_watch import LAUNCHER_PID_VARIABLE, find_launcher

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--master-addr", "127.0.0.1", "--nproc-per-node"]
SCRIPT = """
import os, pathlib, sys, time, stretto

with stretto.world(device="cpu") as world:
    world.barrier()
    pathlib.Path(sys.argv[1], f"begun-{world.rank}").write_text(f"{os.getpid()}\\n")
    while True:
        world.barrier()
        time.sleep(0.05)
"""
_PR_SET_CHILD_SUBREAPER = 36  # from Linux's <sys/prctl.h>


@pytest.fixture
def _adopts_orphans() -> Iterator[None]:
    """Make this process the parent of ranks whose launcher has ended, so that it can read their exit codes."""
    system = ctypes.CDLL(None)
    system.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    yield
    system.prctl(_PR_SET_CHILD_SUBREAPER, 0)


def kill_launcher(command: list[str], folder: Path, num_ranks: int) -> tuple[list[int], str]:
    """Kill a launcher when its ranks have begun; return their exit codes, and what they have printed."""
    environment = {**os.environ, "STRETTO_SECRET": "only for this test", "GLOO_SOCKET_IFNAME": "lo"}
    environment["OMP_NUM_THREADS"] = "1"  # without it, torchrun prints a warning
    environment["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # torch prints a stack trace for each connection to a lost store
    files = [folder / f"begun-{rank}" for rank in range(num_ranks)]
    output = folder / "output"
    with (
        output.open("w") as stream,
        subprocess.Popen(command, stdout=stream, stderr=stream, env=environment) as process,
    ):
        try:
            until = time.monotonic() + 45
            while not all(path.exists() and path.read_text().endswith("\n") for path in files):
                assert process.poll() is None and time.monotonic() < until, output.read_text()
                time.sleep(0.05)
        finally:
            process.kill()
    codes = [exit_code(int(path.read_text())) for path in files]
    return codes, without_gloo_lines(output.read_text())


def exit_code(pid: int) -> int:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the rank did not end with its launcher")


@pytest.mark.long
@pytest.mark.usefixtures("_adopts_orphans")
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.short)])
def test_ranks_of_a_script_end_when_torchrun_is_killed(num_ranks: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    port = ["--master-port", str(free_port())]
    command = [*TORCHRUN, str(num_ranks), *port, str(tmp_path / "script.py"), str(tmp_path)]
    codes, output = kill_launcher(command, tmp_path, num_ranks)
    assert codes == [75] * num_ranks, output
    assert output.count("\n") == 1, output
    message = output.strip()
    assert message.startswith("stretto: error: the launcher of this rank (process ")
    assert message.endswith("has ended without its ranks, so they stop; start it again to resume from the last save")


@pytest.mark.usefixtures("_adopts_orphans")
def test_ranks_of_spawn_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, sys, time, pathlib, stretto\n"
        "def work(folder):\n"  # it has no world, whose loss would end it
        "    pathlib.Path(folder, 'begun-' + os.environ['RANK']).write_text(f'{os.getpid()}\\n')\n"
        "    time.sleep(120)\n"
        "if __name__ == '__main__': stretto.spawn(work, sys.argv[1])\n"
    )
    codes, output = kill_launcher([sys.executable, str(tmp_path / "script.py"), str(tmp_path)], tmp_path, 2)
    assert codes == [75, 75] and output.count("has ended without its ranks, so they stop;") == 1, output


@pytest.mark.long
@pytest.mark.usefixtures("_adopts_orphans")
def test_a_script_without_a_launcher_outlives_its_parent(tmp_path: Path) -> None:
    script = (
        f"import os, pathlib, time, stretto\nwith stretto.world(device='cpu'):\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'begun-0').write_text(f'{{os.getpid()}}\\n')\n    time.sleep(2)\n"
    )
    parent = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1]]); time.sleep(60)"
    codes, output = kill_launcher([sys.executable, "-c", parent, script], tmp_path, 1)
    assert (codes, output) == ([0], "")


def test_only_launchers_whose_end_would_leave_ranks_behind_are_watched() -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "::1"}
    torchrun |= {"MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    srun = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}
    srun |= {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "n1"}
    for variables in ({}, srun):
        assert find_launcher(variables, find_launch_info(variables)) is None
    launcher = find_launcher(torchrun, find_launch_info(torchrun))
    assert launcher is not None and launcher.pid == os.getppid()
    assert launcher.is_needed_to_save and not launcher.prints and not launcher.has_ended
    ours = {**torchrun, "RANK": "0", "LOCAL_RANK": "0", LAUNCHER_PID_VARIABLE: str(os.getpid())}
    del ours["TORCHELASTIC_USE_AGENT_STORE"]
    launcher = find_launcher(ours, find_launch_info(ours))
    assert launcher is not None and launcher.has_ended, "this process is not its own parent"
    assert launcher.prints and not launcher.is_needed_to_save


def test_a_rank_whose_store_is_gone_waits_for_the_end_of_its_launcher(tmp_path: Path) -> None:
    """Connections close before a process ends: without the wait, a rank would report that its store is gone."""
    rank = (
        "import os, pathlib, threading, time\n"
        "from stretto.mesh.launcher_watch import Launcher\n"
        "launcher = Launcher(os.getppid(), is_needed_to_save=True)\n"
        "launcher.block_if_store_is_lost()\n"  # it has not ended yet
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "(folder / 'begun').touch()\n"
        "threading.Timer(1.5, os._exit, [0]).start()\n"
        "launcher.block_if_store_is_lost(20.0)\n"
        "(folder / 'returned').touch()\n"
    )
    launcher = (
        "import pathlib, subprocess, sys, time\n"
        "process = subprocess.Popen([sys.executable, '-c', sys.argv[1]])\n"
        f"while not pathlib.Path({str(tmp_path / 'begun')!r}).exists(): time.sleep(0.02)\n"
        "time.sleep(0.3)\nprint(process.pid, flush=True)\n"
    )
    ended = subprocess.run([sys.executable, "-c", launcher, rank], capture_output=True, text=True, check=True)
    pid, until = int(ended.stdout), time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert (tmp_path / "begun").exists() and not (tmp_path / "returned").exists()
