"""Measures how long messages and all-reduces between ranks take."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from stretto.mesh.world import World

_NUM_WARM_UPS, _NUM_REPEATS = 2, 9


def time_messages(world: World, source: int, target: int, sizes: Sequence[int]) -> list[float]:
    """Return how long a message of each size (in bytes) takes, in seconds: half of the median round trip.

    Every rank must call this. Ranks other than `source` and `target` return zeros.
    """
    seconds = []
    for size in sizes:
        tensor = torch.zeros(max(size // 4, 1), device=world.device)  # float32: 4 bytes per element

        def round_trip(tensor: torch.Tensor = tensor) -> None:
            for sender, receiver in ((source, target), (target, source)):
                if world.rank == sender:
                    dist.send(tensor, receiver)
                elif world.rank == receiver:
                    dist.recv(tensor, sender)

        with world.explain_errors("measuring links"):
            seconds.append(_median_seconds(world, round_trip) / 2 if world.rank in (source, target) else 0.0)
        world.barrier()
    return seconds


def time_all_reduces(world: World, num_ranks: int, sizes: Sequence[int]) -> list[float]:
    """Return the median time, in seconds, of an all-reduce of each size (in bytes) over the first `num_ranks` ranks.

    Every rank must call this. Ranks after the first `num_ranks` return zeros, but also create a group, of only
    themselves: torch names a group after its ranks and the rank's number of groups, which must be equal everywhere.
    """
    ranks = list(range(num_ranks)) if world.rank < num_ranks else [world.rank]
    seconds = []
    with world.explain_errors("measuring links"):
        group = world.new_group(ranks)
        for size in sizes:
            all_reduce = partial(dist.all_reduce, torch.zeros(max(size // 4, 1), device=world.device), group=group)
            seconds.append(_median_seconds(world, all_reduce) if world.rank < num_ranks else 0.0)
    world.barrier()
    # The group is not destroyed: torch could reuse its name for a new group, which would then read the old one's keys.
    return seconds


def _median_seconds(world: World, run: Callable[[], object]) -> float:
    times = []
    for index in range(_NUM_WARM_UPS + _NUM_REPEATS):
        started = time.perf_counter()
        run()
        if world.device.type != "cpu":
            torch.accelerator.synchronize(world.device)
        if index >= _NUM_WARM_UPS:
            times.append(time.perf_counter() - started)
    return statistics.median(times)
