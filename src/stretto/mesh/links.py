"""Links: how long messages and sums between ranks take."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from stretto.mesh.world import World

_NUM_REPEATS = 9


def time_messages(world: World, source: int, target: int, sizes: Sequence[int]) -> list[float]:
    """Return the seconds that messages of some bytes take from one rank to another; all ranks call it.

    Half of what it takes there and back. Ranks that are neither know nothing, and return zeros.
    """
    found = []
    for size in sizes:
        tensor = torch.zeros(max(size // 4, 1), device=world.device)

        def there_and_back(tensor: torch.Tensor = tensor) -> None:
            for sender, receiver in ((source, target), (target, source)):
                if world.rank == sender:
                    dist.send(tensor, receiver)
                elif world.rank == receiver:
                    dist.recv(tensor, sender)

        with world.explain_errors("measuring links"):
            found.append(_median_seconds(world, there_and_back) / 2 if world.rank in (source, target) else 0.0)
        world.barrier()
    return found


def time_all_reduces(world: World, num_ranks: int, sizes: Sequence[int]) -> list[float]:
    """Return the seconds in which the first so many ranks add up tensors of some bytes; all ranks call it."""
    # Ranks that don't take part make a group for themselves: all must have made as many, or later ones never meet.
    ranks = list(range(num_ranks)) if world.rank < num_ranks else [world.rank]
    found = []
    with world.explain_errors("measuring links"):
        group = dist.new_group(ranks, timeout=world.timeout, use_local_synchronization=True)
        for size in sizes:
            tensor = torch.zeros(max(size // 4, 1), device=world.device)

            def all_reduce(tensor: torch.Tensor = tensor) -> None:
                dist.all_reduce(tensor, group=group)

            found.append(_median_seconds(world, all_reduce) if world.rank < num_ranks else 0.0)
    world.barrier()
    # The group is not destroyed: torch would give its name to another, which then meets what it has left in the store.
    return found


def _median_seconds(world: World, run: Callable[[], object]) -> float:
    times = []
    for index in range(_NUM_REPEATS + 2):
        started = time.perf_counter()
        run()
        if world.device.type != "cpu":
            torch.accelerator.synchronize(world.device)
        if index >= 2:
            times.append(time.perf_counter() - started)
    return statistics.median(times)
