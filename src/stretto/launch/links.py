"""Peers: what only several ranks can find out: the links between them, and whether their machines agree."""

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

from stretto.launch.finding import Finding, ok, problem, warning, with_host
from stretto.launch.machine import versions
from stretto.mesh.links import time_messages
from stretto.mesh.world import World
from stretto.plan.units import format_bytes
from stretto.plan.units import format_seconds as as_seconds

# A short message and a long one: the first tells the latency, the difference the bandwidth.
_SIZES = (4, 8 << 20)
# Of many machines, so many are measured.
_MAX_NODES = 8
_SLOW_LATENCY = 5e-3
_SLOW_BANDWIDTH = 50e6
_CLOCK_WARNING, _CLOCK_PROBLEM = 1.0, 300.0


def check_links(num_ranks: int, device: str, time_limit: float) -> list[Finding]:
    """Start ranks on this machine, really, and let them measure the way from one to another."""
    what = f"{num_ranks} ranks here"
    with TemporaryDirectory(prefix="stretto-") as folder:
        path = Path(folder) / "links.json"
        options = ["--ranks", str(num_ranks), "--links", str(path), "--device", device]
        command = [sys.executable, "-m", "stretto", "doctor", *options]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=time_limit, check=False)
        except subprocess.TimeoutExpired:
            return [problem(what, f"did not meet within {time_limit:.0f} s", "see that nothing filters 127.0.0.1")]
        if done.returncode or not path.is_file():
            said = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
            return [problem(what, f"failed: {said}", "see the other findings, and docs/how-to/survive-failures.md")]
        return link_findings(json.loads(path.read_text()))


def measure_links(world: World, local_size: int) -> list[dict[str, Any]]:
    """Return latency and bandwidth from the first rank to its neighbour, and to the first of each other machine.

    Machines may have unequally many ranks: the first one's `local_size` holds for all.
    """
    total, first_size = world.all_reduce([float(world.rank), float(local_size) if world.is_rank_zero else 0.0])
    local_size = int(first_size)
    if total != world.size * (world.size - 1) / 2:
        raise RuntimeError(f"the ranks added up to {total}, which is wrong")
    others = range(local_size, world.size, local_size)
    targets = ([1] if local_size > 1 else []) + list(others)[:_MAX_NODES]
    found = []
    for target in targets:
        short, long = time_messages(world, 0, target, _SIZES)
        found.append(
            {
                "target": target,
                "latency": short,
                "bandwidth": (_SIZES[1] - _SIZES[0]) / max(long - short, 1e-9),
                "is_same_node": target < local_size,
                "device": world.device.type,
            }
        )
    return found


def link_findings(links: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Return what measured links mean."""
    findings = []
    for link in links:
        what = f"link 0-{link['target']}" + ("" if link["is_same_node"] else ", network")
        found = f"{as_seconds(link['latency'])} latency, {format_bytes(link['bandwidth'])}/s, on {link['device']}"
        if link["latency"] > _SLOW_LATENCY or link["bandwidth"] < _SLOW_BANDWIDTH:
            remedy = "see what else uses the machine or the network; fewer, longer chunks ask less of a link"
            findings.append(warning(what, found, remedy))
        else:
            findings.append(ok(what, found))
    return findings


def gather_findings(world: World, local_rank: int, own: list[Finding]) -> list[Finding]:
    """Bring what each machine found to the first rank, with what they have to agree on; others get their own."""
    world.barrier()
    # All read their clocks right after the same sum: as near to one moment as the network allows.
    now, host = time.time(), socket.gethostname()
    told = {
        "host": host,
        "versions": versions(),
        "clock": now,
        "findings": [asdict(finding) for finding in own] if local_rank == 0 else [],
    }
    world.store.set(f"doctor/{world.rank}", json.dumps(told))
    if not world.is_rank_zero:
        world.barrier()
        return own
    timeout = timedelta(seconds=min(60.0, world.timeout.total_seconds()))
    notes = [
        json.loads(world.store.wait_for_message(f"doctor/{rank}", rank, timeout, world.raise_peer_error))
        for rank in range(world.size)
    ]
    world.barrier()
    findings = []
    for said in notes:
        findings += with_host([Finding(**finding) for finding in said["findings"]], said["host"])
    return [*findings, _same_versions(notes), _same_clock(notes)]


def _same_versions(notes: Sequence[Mapping[str, Any]]) -> Finding:
    first = notes[0]
    for rank, said in enumerate(notes):
        for name, own in said["versions"].items():
            if own != first["versions"][name]:
                found = f"{name} {own} on {said['host']} (rank {rank}), {first['versions'][name]} on {first['host']}"
                return problem("versions", found, "install the same versions on every machine")
    listed = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    return ok("versions", f"the same on all {len(notes)} ranks: {listed}")


def _same_clock(notes: Sequence[Mapping[str, Any]]) -> Finding:
    apart = {rank: abs(said["clock"] - notes[0]["clock"]) for rank, said in enumerate(notes)}
    worst = max(apart, key=lambda rank: apart[rank])
    found = f"at most {as_seconds(apart[worst])} apart"
    remedy = f"let a time service set the clock of {notes[worst]['host']}: logs and object storage go by it"
    if apart[worst] > _CLOCK_PROBLEM:
        return problem("clocks", found, remedy)
    return warning("clocks", found, remedy) if apart[worst] > _CLOCK_WARNING else ok("clocks", found)
