"""A real Slurm with two virtual nodes on this machine, for one test."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from stretto.launch.rank_environment import free_port

CONFIG = """
ClusterName=lab
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={first} CPUs=4 RealMemory=2000
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={second} CPUs=4 RealMemory=2000
PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A cluster of nodes n1 and n2."""

    environment: dict[str, str]

    def start(self, *command: str) -> "subprocess.Popen[str]":
        """Start a command on it."""
        return subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, *command: str, seconds: float = 60) -> str:
        """Run a command and return its output."""
        process = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=seconds, check=False
        )
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Start the cluster, or skip the test if this machine does not allow it."""
    programs = ("munged", "slurmctld", "slurmd", "srun", "unshare")
    if os.geteuid() != 0 or not all(map(shutil.which, programs)):
        assert "CI" not in os.environ, "CI must have Slurm: a test that is skipped there tests nothing"
        pytest.skip("needs root, slurm-wlm and munge")
    (folder / "state").mkdir(parents=True)
    ports = {name: free_port() for name in ("control", "first", "second")}
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, **ports))
    # The nodes' names resolve to this machine, in their own mount namespaces only.
    (folder / "hosts").write_text(f"127.0.0.1 localhost n1 n2 {socket.gethostname()}\n")
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    start_node = f"mount --bind {folder}/hosts /etc/hosts; exec slurmd -D -N"
    commands: list[Sequence[str]] = [
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
         f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"],
        ["slurmctld", "-D"],
        ["unshare", "-m", "sh", "-c", f"{start_node} n1"],
        ["unshare", "-m", "sh", "-c", f"{start_node} n2"],
    ]  # fmt: skip
    started = []
    try:
        for command in commands:
            started.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
            if command[0] == "munged":
                _await(lambda: (folder / "munge.socket").exists(), "munged did not start")
        cluster = Slurm(environment)
        _await(lambda: "idle" in cluster.run("sinfo", "-h", "-t", "idle", "-o", "%t %D").split(), "no idle node")
        _await(lambda: "n[1-2]" in cluster.run("sinfo", "-h", "-t", "idle", "-o", "%N"), "a node is missing")
        yield cluster
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(20)


def _await(condition: Callable[[], bool], error: str, seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if condition():
                return
        except AssertionError:
            # Slurm's controller does not answer yet.
            time.sleep(0.1)
        time.sleep(0.1)
    raise AssertionError(error)
