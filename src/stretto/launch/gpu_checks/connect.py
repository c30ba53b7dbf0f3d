"""Connects all neighbors in both directions, as stages are, sends messages both ways, and sums over all ranks."""

from pathlib import Path
from typing import Any

import torch

from stretto.base.units import format_bytes, format_seconds
from stretto.launch.gpu_checks.result import CheckResult
from stretto.mesh.channel import Channel
from stretto.mesh.link_timing import time_messages
from stretto.mesh.mesh import Mesh
from stretto.mesh.topology import Topology
from stretto.mesh.world import World

_MESSAGE_SIZES = (4, 8 << 20)  # in bytes: for the latency and for the bandwidth
_NUM_ELEMENTS = 1024


def run(world: World, name: str, folder: Path) -> CheckResult:
    """Connect, check the content of messages and sums, and measure each link."""
    mesh = Mesh(world, Topology(1, world.size))
    assert mesh.forward_channel is not None and mesh.backward_channel is not None
    last = world.size - 1
    is_right = [
        _pass_on(world, mesh.forward_channel, None if world.rank == 0 else world.rank - 1),
        _pass_on(world, mesh.backward_channel, None if world.rank == last else world.rank + 1),
    ]
    rank_sum, num_wrong = world.all_reduce([world.rank, is_right.count(False)])
    links = [_time_link(world, source) for source in range(last)]
    figures = {"links": links, "wrong_messages": int(num_wrong), "sum_of_ranks": rank_sum}
    if num_wrong or rank_sum != world.size * last / 2:
        message = (
            f"{num_wrong:.0f} of {2 * last} messages arrived wrong, and the sum of ranks 0 to {last} is {rank_sum:g}"
        )
        return CheckResult("failed", message, figures=figures)
    narrowest = min(links, key=lambda link: link["bytes_per_second"])
    farthest = max(links, key=lambda link: link["latency_seconds"])
    latency, bandwidth = format_seconds(farthest["latency_seconds"]), format_bytes(narrowest["bytes_per_second"])
    message = (
        f"{world.size} ranks connect in both directions and all-reduce; highest latency {latency} (ranks "
        f"{farthest['ranks']}), lowest bandwidth {bandwidth}/s (ranks {narrowest['ranks']})"
    )
    return CheckResult("passed", message, f"at most {latency}, at least {bandwidth}/s", figures)


def _pass_on(world: World, channel: Channel, source: int | None) -> bool:
    """Send this rank's number to the next rank of a channel; return whether that of `source` arrives."""
    buffer = torch.full((_NUM_ELEMENTS,), -1.0, device=world.device)
    channel.post_receives(iter([] if source is None else [buffer]))
    channel.send(torch.full((_NUM_ELEMENTS,), float(world.rank), device=world.device))
    is_right = source is None or bool((channel.receive(f"a message from rank {source}") == source).all())
    channel.flush()
    return is_right


def _time_link(world: World, source: int) -> dict[str, Any]:
    times = time_messages(world, source, source + 1, _MESSAGE_SIZES)
    # All ranks but the source add zeros.
    short, long = world.all_reduce(times if world.rank == source else [0.0, 0.0])
    return {"ranks": f"{source}-{source + 1}", "latency_seconds": short, "bytes_per_second": _MESSAGE_SIZES[1] / long}
