"""A real Slurm with two virtual nodes on this machine, for one test."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stretto.launch.rank_environment import free_port

CONFIG = """
ClusterName=lab
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
FirstJobId={first_job}
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
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=2
"""
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")


@dataclass(frozen=True)
class Slurm:
    """A cluster of nodes n1 and n2. Jobs of its partition `urgent` preempt those of `debug`, the default."""

    folder: Path
    environment: dict[str, str]
    daemons: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def submit(self, script: Path, output: Path, *options: str) -> str:
        """Submit a batch script; return the number of the job."""
        return self.run("sbatch", "--parsable", f"--output={output}", *options, str(script)).strip()

    def state(self, job: str) -> str:
        """Return the state of a job, such as PENDING; of an array, those of its tasks."""
        return self.run("squeue", "--noheader", "--states=all", "--array", f"--jobs={job}", "--format=%T").strip()

    def await_end(self, job: str, seconds: float = 150) -> str:
        """Wait until a job has ended; return its state. A requeued job would wait for a while, so it starts at once."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            state = self.state(job)
            if all(word in _ENDED for word in state.split()):
                return state
            if state == "PENDING":
                self.start_now(job)
            time.sleep(0.5)
        return state

    def start_daemon(self, name: str, command: Sequence[str]) -> None:
        """Start a daemon of the cluster."""
        self.daemons[name] = subprocess.Popen(
            command, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def start_node(self, name: str) -> None:
        """Start the daemon of a node, in a mount namespace of its own, where the names of nodes resolve."""
        command = f"mount --bind {self.folder}/hosts /etc/hosts; exec slurmd -D -N {name}"
        self.start_daemon(name, ["unshare", "-m", "sh", "-c", command])

    def lose_node(self, name: str) -> None:
        """Kill all processes of a node at once, and tell Slurm, which would notice it only after some minutes."""
        namespace = _mount_namespace(self.daemons[name].pid)
        assert namespace not in (None, _mount_namespace(os.getpid())), "the node is not running, or not by itself"
        for pid in _pids():
            if _mount_namespace(pid) == namespace:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.daemons[name].wait(20)
        self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=lost")

    def start_now(self, job: str) -> None:
        """Start a job that was requeued, if its nodes are free, without the usual delay of two minutes."""
        # Not within the same second: a node refuses the credential of a job that was revoked in that second.
        time.sleep(2)
        with contextlib.suppress(AssertionError):  # it has started meanwhile
            self.run("scontrol", "update", f"JobId={job}", "StartTime=now")

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
    # Ranks derive their port from the number of the job, so that of two clusters must differ.
    first_job = free_port()
    ports = {name: free_port() for name in ("control", "first", "second")}
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, first_job=first_job, **ports))
    # The nodes' names resolve to this machine, in their own mount namespaces only.
    (folder / "hosts").write_text(f"127.0.0.1 localhost n1 n2 {socket.gethostname()}\n")
    # The nodes share the cores of this machine: threads of ranks would spin while they wait for each other.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SLURM_CONF": str(folder / "slurm.conf")}
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    cluster = Slurm(folder, environment)
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
              f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log",
              f"--seed-file={folder}/munged.seed"]  # fmt: skip
    try:
        cluster.start_daemon("munged", munged)
        _await(lambda: (folder / "munge.socket").exists(), "munged did not start")
        cluster.start_daemon("slurmctld", ["slurmctld", "-D"])
        for name in ("n1", "n2"):
            cluster.start_node(name)
        _await(lambda: "idle" in cluster.run("sinfo", "-h", "-t", "idle", "-o", "%t %D").split(), "no idle node")
        _await(lambda: "n[1-2]" in cluster.run("sinfo", "-h", "-t", "idle", "-o", "%N"), "a node is missing")
        yield cluster
    finally:
        # Not SIGTERM to the daemons: a node waits for its jobs, and a job of a test that has failed outlives its node.
        _kill_cluster(folder)
        for process in cluster.daemons.values():
            process.wait(20)


def _kill_cluster(folder: Path) -> None:
    """Kill the daemons and jobs of the cluster in a folder; all have the path of its config in their environments."""
    variable = f"SLURM_CONF={folder}/slurm.conf".encode()
    until = time.monotonic() + 10
    while pids := [pid for pid in _pids() if pid != os.getpid() and variable in _environment(pid)]:
        assert time.monotonic() < until, f"processes of a Slurm job are still running: {pids}"
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _mount_namespace(pid: int) -> str | None:
    """Return the mount namespace of a process; None if it has ended."""
    try:
        return str(Path(f"/proc/{pid}/ns/mnt").readlink())
    except OSError:
        return None


def _environment(pid: int) -> list[bytes]:
    """Return the variables that a process was started with; none if it has ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


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
