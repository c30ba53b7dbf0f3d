"""Links: how long messages and sums between ranks take."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from stretto.mesh.mesh import Mesh

_NUM_REPEATS = 9


def time_messages(mesh: Mesh, source: int, target: int, sizes: Sequence[int]) -> list[float]:
    """Return the seconds that messages of some bytes take from one rank to another; all ranks call it.

    Half of what it takes there and back. Ranks that are neither know nothing, and return zeros.
    """
    world = mesh.world
    found = []
    for size in sizes:
        tensor = torch.zeros(max(size // 4, 1), device=world.device)

        def there_and_back(tensor: torch.Tensor = tensor) -> None:
            for sender, receiver in ((source, target), (target, source)):
                if world.rank == sender:
                    dist.send(tensor, receiver)
                elif world.rank == receiver:
                    dist.recv(tensor, sender)

        with _peer_errors(mesh):
            found.append(_median_seconds(mesh, there_and_back) / 2 if world.rank in (source, target) else 0.0)
        mesh.barrier()
    return found


def time_all_reduces(mesh: Mesh, num_ranks: int, sizes: Sequence[int]) -> list[float]:
    """Return the seconds in which the first so many ranks add up tensors of some bytes; all ranks call it."""
    world = mesh.world
    # Ranks that don't take part make a group for themselves: all must have made as many, or later ones never meet.
    ranks = list(range(num_ranks)) if world.rank < num_ranks else [world.rank]
    found = []
    with _peer_errors(mesh):
        group = dist.new_group(ranks, timeout=world.timeout, use_local_synchronization=True)
        for size in sizes:
            tensor = torch.zeros(max(size // 4, 1), device=world.device)

            def all_reduce(tensor: torch.Tensor = tensor) -> None:
                dist.all_reduce(tensor, group=group)

            found.append(_median_seconds(mesh, all_reduce) if world.rank < num_ranks else 0.0)
    mesh.barrier()
    # The group is not destroyed: torch would give its name to another, which then meets what it has left in the store.
    return found


@contextmanager
def _peer_errors(mesh: Mesh) -> Iterator[None]:
    """Turn the loss of a peer into the error that says so."""
    try:
        yield
    except RuntimeError as error:
        raise mesh.explain_error(error, "measuring links") from error


def _median_seconds(mesh: Mesh, run: Callable[[], object]) -> float:
    times = []
    for index in range(_NUM_REPEATS + 2):
        started = time.perf_counter()
        run()
        if mesh.world.device.type != "cpu":
            torch.accelerator.synchronize(mesh.world.device)
        if index >= 2:
            times.append(time.perf_counter() - started)
    return statistics.median(times)
