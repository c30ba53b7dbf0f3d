"""CopyRing: each rank sends bytes to another one, on another node if there are several, in the background."""

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.mesh.world import World


class CopyRing:
    """Connections of their own, over gloo, so that they don't wait for a step's messages. All ranks create it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._group = world.new_group(range(world.size), backend=dist.Backend.GLOO)
        # The ranks of a node have consecutive numbers.
        distance = world.local_size if world.local_size < world.size else 1
        self.keeper = (world.rank + distance) % world.size  # keeps what this rank sends
        self.kept = (world.rank - distance) % world.size  # this rank keeps what that one sends

    def exchange(self, content: Tensor) -> Tensor:
        """Send bytes to the rank that keeps them; return those that this rank keeps."""
        sent = [dist.isend(part, self.keeper, self._group) for part in (torch.tensor([len(content)]), content)]
        received = self.receive(self.kept)
        for work in sent:
            assert work is not None
            work.wait()
        return received

    def send(self, content: Tensor, rank: int) -> None:
        """Send bytes to a rank."""
        with self._world.explain_errors("sending a copy"):
            dist.send(torch.tensor([len(content)]), rank, self._group)
            dist.send(content, rank, self._group)

    def receive(self, rank: int) -> Tensor:
        """Receive bytes from a rank."""
        with self._world.explain_errors("receiving a copy"):
            length = torch.zeros(1, dtype=torch.int64)
            dist.recv(length, rank, self._group)
            content = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(content, rank, self._group)
        return content
