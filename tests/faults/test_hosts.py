"""Two hosts under torchrun: a network that is interrupted or slow, and hosts that leave and join."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest

from helpers.fault_loss import FaultLoss, FaultMeter, LossRecorder, log_lines, logged_losses
from helpers.network_hosts import ADDRESSES, HostPair, two_hosts
from helpers.train_process import ReferenceRuns, TrainProcess, children, is_running
from stretto.checkpoint.checkpoint import complete_checkpoint_names, find_checkpoint, lineage_names, read_claims
from stretto.checkpoint.lineage import Claim
from stretto.checkpoint.storage import LocalStorage

pytestmark = pytest.mark.faults
PORT = 29511


def start(hosts: HostPair, name: str, run: TrainProcess, num_hosts: str = "1:2") -> "subprocess.Popen[str]":
    """Start the run's ranks of one host with torchrun."""
    is_host = name == hosts.names[0]
    address = ADDRESSES[name]
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={num_hosts}", "--nproc-per-node=1",
        "--max-restarts=5", "--rdzv-backend=c10d", "--rdzv-id=faults",
        f"--rdzv-endpoint={ADDRESSES[hosts.names[0]]}:{PORT}",
        f"--rdzv-conf=is_host={int(is_host)},last_call_timeout=3,read_timeout=60,join_timeout=60",
        f"--local-addr={address}", "--monitor-interval=0.2", "-m",
    ]  # fmt: skip
    command = [*torchrun, *run.command()[2:]]
    environment = {
        **network(hosts, name),
        "NAME_OF_HOST": name,
        # Otherwise torch's agents reuse the first round's store without sharing its address, and a late agent waits.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    return hosts.run(name, command, environment)


def start_pod(hosts: HostPair, name: str, run: TrainProcess) -> "subprocess.Popen[str]":
    """Start the run's ranks of one host with `stretto train`, as a pod of a JobSet does."""
    variables = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": str(hosts.names.index(name)),
        "PET_MASTER_ADDR": ADDRESSES[hosts.names[0]],
        "PET_MASTER_PORT": str(PORT),
    }
    return hosts.run(name, run.command(), {**variables, **network(hosts, name)})


def network(hosts: HostPair, name: str) -> dict[str, str]:
    """Return the environment variables of ranks on a host."""
    return {"GLOO_SOCKET_IFNAME": hosts.device(name), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


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


@pytest.mark.short
def test_after_a_network_failure_only_one_side_writes(
    faults_data: Path, tmp_path: Path, record_loss: LossRecorder
) -> None:
    seconds = 15.0
    run = TrainProcess(tmp_path / "run", faults_data, (2, 1), OPTIONS)
    storage = LocalStorage(tmp_path / "run" / "checkpoints")
    with two_hosts(tmp_path) as hosts:
        first, second = (start(hosts, name, run) for name in hosts.names)
        run.process = first
        run.await_step(60)
        assert len(read_claims(storage)) == 1
        hosts.disconnect()
        meter = FaultMeter(tmp_path / "run")
        (rank_of_second,) = ranks_of(second)
        # The disconnected side ends by itself.
        while is_running(rank_of_second) and time.monotonic() - meter.time < 30:
            time.sleep(0.1)
        ended = time.monotonic() - meter.time
        # The side with the rendezvous continues alone, in a layout for the remaining ranks.
        assert await_claim(storage, 2).num_ranks == 1
        record_loss(meter.await_progress())
        time.sleep(max(0.0, seconds - (time.monotonic() - meter.time)))
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


def test_a_slow_network_only_delays_the_run(
    reference_runs: ReferenceRuns, faults_data: Path, tmp_path: Path, record_loss: LossRecorder
) -> None:
    expected = reference_runs[2, 1]
    run = TrainProcess(tmp_path / "run", faults_data, (2, 1), {"run.timeout": 6})
    with two_hosts(tmp_path) as hosts:
        first, second = (start(hosts, name, run, num_hosts="2") for name in hosts.names)
        run.process = first
        run.await_step(10)
        hosts.slow_down(delay_ms=50, rate="2mbit")
        meter = FaultMeter(tmp_path / "run")
        run.await_step(meter.last_step + 10)
        hosts.speed_up()
        outputs = [finish(process, 60)[1] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    assert set(read_claims(LocalStorage(tmp_path / "run" / "checkpoints"))) == {1}, "one launch, without a restart"
    assert run.final_state() == expected
    rows = [row for row in log_lines(tmp_path / "run" / "log.jsonl") if row["kind"] == "step"]
    seconds = {row["step"]: row["compute_seconds"] for row in rows}
    usual = median(seconds.values())
    slow = [seconds[meter.last_step + number] for number in range(2, 11)]
    # In the slow network, a message takes 50 ms or more, and each step needs several.
    assert min(slow) > 3 * usual, seconds
    record_loss(FaultLoss(0, sum(slow) - usual * len(slow)))


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


def test_pods_on_two_hosts_end_together_and_resume_when_they_are_started_again(
    faults_data: Path, tmp_path: Path
) -> None:
    options: dict[str, object] = {
        "run.timeout": 6,
        "train.steps": 10**6,
        "save.every": 20,
        "save.keep": 10**6,
        "run.log_every": 500,
    }
    run = TrainProcess(tmp_path / "run", faults_data, (2, 1), options)
    with two_hosts(tmp_path) as hosts:
        for fault in ("SIGKILL of a rank", "SIGKILL of a host", "network", "SIGTERM of a host"):
            before = len((tmp_path / "run" / "log.jsonl").read_text()) if (tmp_path / "run").exists() else 0
            pods = [start_pod(hosts, name, run) for name in hosts.names]
            run.process = pods[0]
            await_growth(tmp_path / "run" / "log.jsonl", before + 20_000)
            if fault == "network":
                hosts.disconnect()
            else:
                victims = ranks_of(pods[1]) if fault == "SIGKILL of a rank" else [pods[1].pid]
                victims += ranks_of(pods[1]) if fault == "SIGKILL of a host" else []
                for pid in victims:
                    os.kill(pid, signal.SIGTERM if fault == "SIGTERM of a host" else signal.SIGKILL)
            codes = [finish(pod, 40)[0] for pod in pods]
            hosts.reconnect()
            assert codes == [75, -signal.SIGKILL if fault == "SIGKILL of a host" else 75], fault
    claims = read_claims(LocalStorage(tmp_path / "run" / "checkpoints"))
    assert [claim.num_ranks for claim in claims.values()] == [2, 2, 2, 2]
    check_lineage(tmp_path / "run")


def await_growth(path: Path, size: int, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not path.exists() or path.stat().st_size < size:
        assert time.monotonic() < until, f"{path} did not grow to {size} bytes"
        time.sleep(0.05)


def check_lineage(folder: Path) -> None:
    """Check that all checkpoints are in one lineage, and that no step is missing or logged twice."""
    storage = LocalStorage(folder / "checkpoints")
    names = complete_checkpoint_names(storage)
    assert sorted(lineage_names(storage)) == sorted(names)
    assert len(logged_losses(folder)) == find_checkpoint(folder).manifest.training_state.step


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
