"""Two hosts under torchrun: an interrupted network, and hosts that leave and join."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.network_hosts import ADDRESSES, HostPair, two_hosts
from helpers.train_process import TrainProcess, children
from stretto.checkpoint.checkpoint import complete_checkpoint_names, find_checkpoint, read_claims
from stretto.checkpoint.lineage import Claim, lineage
from stretto.checkpoint.storage import LocalStorage

pytestmark = pytest.mark.faults
PORT = 29511


def start(hosts: HostPair, name: str, run: TrainProcess) -> "subprocess.Popen[str]":
    """Start the run's ranks of one host with torchrun."""
    is_host = name == hosts.names[0]
    address = ADDRESSES[name]
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[hosts.names[0]]}:{PORT}", "--rdzv-id=faults",
        f"--rdzv-conf=is_host={int(is_host)},last_call_timeout=3,read_timeout=60,join_timeout=60",
        f"--local-addr={address}", "--monitor-interval=0.2", "-m",
    ]  # fmt: skip
    command = [*torchrun, *run.command()[2:]]
    rows = subprocess.run(
        ["ip", "-n", name, "-br", "addr"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    device = next(row.split()[0] for row in rows if address in row)
    environment = {
        "GLOO_SOCKET_IFNAME": device,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # Otherwise torch's agents reuse the first round's store without sharing its address, and a late agent waits.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    return hosts.run(name, command, environment)


def finish(process: "subprocess.Popen[str]", seconds: float) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"it did not end within {seconds} s:\n{output[-5000:]}") from None
    return process.returncode, output


OPTIONS: dict[str, object] = {
    "layout.elastic": "true",
    "run.timeout": 6,
    "train.steps": 10**6,
    "save.every": 50,
    "save.keep": 10**6,
    "run.log_every": 500,
}


@pytest.mark.parametrize("seconds", [pytest.param(15.0, marks=pytest.mark.short), 30.0])
def test_after_a_network_failure_only_one_side_writes(seconds: float, faults_data: Path, tmp_path: Path) -> None:
    run = TrainProcess(tmp_path / "run", faults_data, (2, 1), OPTIONS)
    storage = LocalStorage(tmp_path / "run" / "checkpoints")
    with two_hosts(tmp_path) as hosts:
        first = start(hosts, hosts.names[0], run)
        second = start(hosts, hosts.names[1], run)
        run.process = first
        run.await_step(60)
        assert len(read_claims(storage)) == 1
        hosts.disconnect()
        disconnected = time.monotonic()
        (rank_of_second,) = ranks_of(second)
        # The disconnected side ends by itself.
        while is_running(rank_of_second) and time.monotonic() - disconnected < 30:
            time.sleep(0.1)
        ended = time.monotonic() - disconnected
        # The side with the rendezvous continues alone, in a layout for the remaining ranks.
        assert await_claim(storage, 2).num_ranks == 1
        time.sleep(max(0.0, seconds - (time.monotonic() - disconnected)))
        hosts.reconnect()
        # torchrun's agent on the other side now rejoins or ends, depending on timing; both are right.
        time.sleep(seconds / 3)
        first.send_signal(signal.SIGTERM)
        _, output = finish(first, 60)
        second.send_signal(signal.SIGTERM)
        finish(second, 60)
    assert ended < 6 + 15, f"the disconnected side took {ended:.0f} s to end"
    assert "that step is saved, so start again to resume" in output, output
    check_lineage(tmp_path / "run")


def test_hosts_can_leave_and_join(faults_data: Path, tmp_path: Path) -> None:
    run = TrainProcess(tmp_path / "run", faults_data, (2, 1), OPTIONS)
    storage = LocalStorage(tmp_path / "run" / "checkpoints")
    with two_hosts(tmp_path) as hosts:
        first = start(hosts, hosts.names[0], run)
        run.process = first
        run.await_step(60)
        second = start(hosts, hosts.names[1], run)
        assert await_claim(storage, 2).num_ranks == 2
        before = int(str(read_claims(storage)[2].resumed_from).split("-")[1])
        run.await_step(before + 60)
        # All processes of the host at once.
        for process in [second.pid, *ranks_of(second)]:
            os.kill(process, signal.SIGKILL)
        assert await_claim(storage, 3).num_ranks == 1
        before = int(str(read_claims(storage)[3].resumed_from).split("-")[1])
        run.await_step(before + 60)
        first.send_signal(signal.SIGTERM)
        _, output = finish(first, 60)
    assert [claim.num_ranks for claim in read_claims(storage).values()] == [1, 2, 1]
    assert output.count("resume  after step") == 2, output
    check_lineage(tmp_path / "run")


def check_lineage(folder: Path) -> None:
    """Check that all checkpoints are in one lineage, and that no step is missing or logged twice."""
    storage = LocalStorage(folder / "checkpoints")
    names = complete_checkpoint_names(storage)
    assert sorted(lineage(read_claims(storage), names)) == sorted(names)
    rows = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    steps = [row["step"] for row in rows if row["kind"] == "step"]
    assert steps == list(range(1, find_checkpoint(folder).manifest.training_state.step + 1))


def is_running(pid: int) -> bool:
    """Is a process running? A zombie, whose parent has not waited for it, is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ranks_of(agent: "subprocess.Popen[str]") -> list[int]:
    """Return the ranks that torchrun has started; `ip netns exec` has replaced itself by torchrun."""
    return [pid for pid in children(agent.pid) if b"train" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def await_claim(storage: LocalStorage, generation: int, seconds: float = 60) -> Claim:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        claim = read_claims(storage).get(generation)
        if claim is not None:
            return claim
        time.sleep(0.1)
    raise AssertionError(f"there is no generation {generation}")
