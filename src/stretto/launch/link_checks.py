"""Checks that need several ranks: the links between them, and whether versions and clocks agree."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stretto.base.units import format_bytes, format_seconds
from stretto.launch.finding import Finding, ok, problem, warning
from stretto.launch.machine import versions
from stretto.mesh.link_timing import time_messages
from stretto.mesh.world import World

# In bytes. The short message measures the latency, the long one the bandwidth.
_MESSAGE_SIZES = (4, 8 << 20)
_MAX_NODES = 8  # links to at most this many other nodes are measured
# Slower links get a warning.
_MAX_LATENCY_SECONDS = 5e-3
_MIN_BANDWIDTH_BYTES_PER_SECOND = 50e6
# A clock that differs from rank 0's by more than these gets a warning, or is reported as a problem.
_CLOCK_WARNING_SECONDS, _CLOCK_PROBLEM_SECONDS = 1.0, 300.0


def check_links(num_ranks: int, device: str, seconds: float) -> list[Finding]:
    """Start ranks on this node and measure the link between the first two, within `seconds`."""
    name = f"{num_ranks} local ranks"
    with TemporaryDirectory(prefix="stretto-") as folder:
        path = Path(folder) / "links.json"
        options = ["--ranks", str(num_ranks), "--links", str(path), "--device", device]
        command = [sys.executable, "-P", "-m", "stretto", "doctor", *options]
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            remedy = "check for a firewall that blocks 127.0.0.1"
            return [problem(name, f"did not finish within {seconds:.0f} s", remedy)]
        if process.returncode or not path.is_file():
            message = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            return [problem(name, f"failed: {message}", "see the other findings, and docs/how-to/survive-failures.md")]
        return link_findings(json.loads(path.read_text()))


def measure_rank_zero_links(world: World, local_size: int) -> list[dict[str, Any]]:
    """Return latency and bandwidth from rank 0 to rank 1 on its node, and to the first ranks of up to 8 other nodes.

    All ranks must call this; only rank 0's result (in s and bytes/s) is valid. Nodes are assumed to be of equal size.
    """
    # The sum of ranks shows that collectives work. The other sum broadcasts rank 0's local_size: all others add 0.
    rank_sum, local_size_sum = world.all_reduce([world.rank, local_size if world.is_rank_zero else 0])
    local_size = int(local_size_sum)
    if rank_sum != world.size * (world.size - 1) / 2:
        raise RuntimeError(f"an all-reduce of the rank numbers gave a wrong sum, {rank_sum}")
    first_ranks = range(local_size, world.size, local_size)  # of the other nodes
    targets = ([1] if local_size > 1 else []) + list(first_ranks)[:_MAX_NODES]
    links = []
    for target in targets:
        short_seconds, long_seconds = time_messages(world, 0, target, _MESSAGE_SIZES)
        links.append(
            {
                "target": target,
                "latency": short_seconds,
                "bandwidth": _MESSAGE_SIZES[1] / max(long_seconds, 1e-9),
                "is_same_node": target < local_size,
                "device": world.device.type,
            }
        )
    return links


def link_findings(links: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Return a finding for each link from `measure_rank_zero_links`."""
    findings = []
    for link in links:
        name = f"link 0-{link['target']}" + ("" if link["is_same_node"] else ", network")
        detail = f"{format_seconds(link['latency'])} latency, {format_bytes(link['bandwidth'])}/s, on {link['device']}"
        if link["latency"] > _MAX_LATENCY_SECONDS or link["bandwidth"] < _MIN_BANDWIDTH_BYTES_PER_SECOND:
            remedy = "check what else uses the node or the network; fewer, longer chunks send fewer messages"
            findings.append(warning(name, detail, remedy))
        else:
            findings.append(ok(name, detail))
    return findings


def gather_findings(world: World, local_rank: int, local_findings: list[Finding]) -> list[Finding]:
    """On rank 0, return every node's findings and two more about versions and clocks; elsewhere, `local_findings`."""
    world.barrier()
    # All ranks leave the barrier at about the same moment, so their clocks can be compared.
    now, host = time.time(), socket.gethostname()
    message = {
        "host": host,
        "versions": versions(),
        "clock": now,
        "findings": [asdict(finding) for finding in local_findings] if local_rank == 0 else [],
    }
    world.store.set(f"doctor/{world.rank}", json.dumps(message))
    if not world.is_rank_zero:
        world.barrier()  # rank 0 enters it after it has read all messages
        return local_findings
    timeout = timedelta(seconds=min(60.0, world.timeout.total_seconds()))
    keys = {rank: f"doctor/{rank}" for rank in range(world.size)}
    messages = [json.loads(text) for text in world.store.wait_for_messages(keys, timeout, world.raise_failure)]
    world.barrier()
    findings = [
        Finding(**{**finding, "host": message["host"]}) for message in messages for finding in message["findings"]
    ]
    return [*findings, _compare_versions(messages), _compare_clocks(messages)]


def _compare_versions(messages: Sequence[Mapping[str, Any]]) -> Finding:
    first = messages[0]
    for rank, message in enumerate(messages):
        for name, version in message["versions"].items():
            expected = first["versions"][name]
            if version != expected:
                detail = f"{name} {version} on {message['host']} (rank {rank}), {expected} on {first['host']}"
                return problem("versions", detail, "install the same versions on every node")
    versions_text = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    return ok("versions", f"the same on all {len(messages)} ranks: {versions_text}")


def _compare_clocks(messages: Sequence[Mapping[str, Any]]) -> Finding:
    offsets = {rank: abs(message["clock"] - messages[0]["clock"]) for rank, message in enumerate(messages)}
    worst_rank = max(offsets, key=lambda rank: offsets[rank])
    detail = f"differ from rank 0's by at most {format_seconds(offsets[worst_rank])}"
    remedy = f"synchronize the clock of {messages[worst_rank]['host']} (NTP): logs and object storage depend on it"
    if offsets[worst_rank] > _CLOCK_PROBLEM_SECONDS:
        return problem("clocks", detail, remedy)
    return warning("clocks", detail, remedy) if offsets[worst_rank] > _CLOCK_WARNING_SECONDS else ok("clocks", detail)
