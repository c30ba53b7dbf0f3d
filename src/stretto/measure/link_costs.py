"""Measures the latency and bandwidth of messages and all-reduces between ranks."""

import math
from collections.abc import Sequence

from stretto.engine.replica import ReplicaEngine
from stretto.measure.profile_input import ProfileInput
from stretto.measure.timing import synchronized_time
from stretto.mesh.link_timing import time_all_reduces, time_messages
from stretto.mesh.mesh import Mesh
from stretto.mesh.topology import Topology
from stretto.mesh.world import World
from stretto.plan.profile import AllReduceCost, Link

# In bytes. The small size gives the latency, and the extra time of the large one gives the bandwidth.
_MESSAGE_SIZES = (1 << 10, 1 << 23)
_ALL_REDUCE_SIZES = (1 << 10, 1 << 25)
_NUM_REPEATS = 9


def measure_links(world: World) -> tuple[Link | None, Link | None]:
    """Return the links inside a node and between nodes; each is None if no two ranks are connected that way."""
    if world.is_single_rank:
        return None, None
    intra_node = _measure_link(world, 1) if world.local_size > 1 else None
    inter_node = _measure_link(world, world.local_size) if world.local_size < world.size else None
    return intra_node, inter_node


def measure_bare_all_reduce(world: World, num_ranks: int) -> AllReduceCost:
    """Time all-reduces of plain tensors on the first `num_ranks` ranks; all ranks call this."""
    link = _link_from_times(_ALL_REDUCE_SIZES, time_all_reduces(world, num_ranks, _ALL_REDUCE_SIZES))
    return AllReduceCost(ranks=num_ranks, latency=link.latency, bandwidth=link.bandwidth)


def measure_all_reduce(profile_input: ProfileInput, world: World, num_ranks: int) -> AllReduceCost:
    """Time DDP's reducer on the model's own weights: a training step on one row and one time step, with and without it.

    An all-reduce of plain tensors would leave out the reducer's copies and their effect on caches. All ranks call this.
    """
    mesh = Mesh(world, Topology(num_ranks, world.size // num_ranks, "replicas"))
    (latency,) = time_all_reduces(world, num_ranks, _ALL_REDUCE_SIZES[:1])
    is_measured = world.rank < num_ranks  # in this topology, these ranks are the first stage
    window = profile_input.crop(1, 1)
    plain_engine = profile_input.make_engine(chunks=1)
    replica_engine = (
        ReplicaEngine(profile_input.make_engine(chunks=1), mesh, has_equal_weights=True) if is_measured else None
    )
    fastest = [math.inf, math.inf]  # seconds per step without and with the reducer, the mean over ranks
    for _ in range(_NUM_REPEATS):
        for index, engine in enumerate((plain_engine, replica_engine)):
            world.barrier()
            started = synchronized_time(profile_input.device)
            if is_measured and engine is not None:
                engine.step(window, None, key=1)
            seconds = synchronized_time(profile_input.device) - started if is_measured else 0.0
            fastest[index] = min(fastest[index], world.all_reduce([seconds])[0] / num_ranks)
    num_bytes = sum(weight.nbytes for weight in plain_engine.stack.parameters() if weight.requires_grad)
    transfer_seconds = max(fastest[1] - fastest[0] - latency, 1e-9)
    return AllReduceCost(ranks=num_ranks, latency=latency, bandwidth=max(num_bytes, 1) / transfer_seconds)


def _measure_link(world: World, target: int) -> Link:
    return _link_from_times(_MESSAGE_SIZES, time_messages(world, 0, target, _MESSAGE_SIZES))


def _link_from_times(sizes: tuple[int, int], seconds: Sequence[float]) -> Link:
    # Ranks that were not measured pass zeros and get a meaningless link. Only rank 0's link is used.
    extra_seconds = max(seconds[1] - seconds[0], 1e-9)
    return Link(latency=seconds[0], bandwidth=(sizes[1] - sizes[0]) / extra_seconds)
