"""CopyRing: each rank sends bytes to another one, on another node if there are several, in the background."""

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.mesh.world import World


class CopyRing:
    """Connections of their own, over gloo, so that they don't wait for a step's messages.

    All ranks create it, with the same `nodes`: the name of each rank's node.
    """

    def __init__(self, world: World, nodes: Sequence[str]) -> None:
        self._world = world
        self._group = world.new_group(range(world.size), backend=dist.Backend.GLOO)
        by_rank = keepers(nodes)
        self.keeper = by_rank[world.rank]  # keeps what this rank sends
        self.kept = by_rank.index(world.rank)  # this rank keeps what that one sends

    def exchange(self, content: Tensor) -> Tensor:
        """Send bytes to the rank that keeps them; return those that this rank keeps.

        An error is torch's own: in the background, a copy that is slow must not have the ranks look for one that is.
        """
        sent = [dist.isend(part, self.keeper, self._group) for part in (torch.tensor([len(content)]), content)]
        received = self._receive(self.kept)
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
            return self._receive(rank)

    def _receive(self, rank: int) -> Tensor:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, rank, self._group)
        content = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(content, rank, self._group)
        return content


def keepers(nodes: Sequence[str]) -> list[int]:
    """Return, for each of several ranks, the rank that keeps its copy: on another node for as many as possible.

    Put the ranks in order of their nodes; each sends to the one that is as many places further as the largest node has
    ranks, and so is on another node.

        node     a   b  b   c  c
        rank     0   1  3   2  4
        keeper   3   2  4   0  1
    """
    by_node = sorted(range(len(nodes)), key=lambda rank: nodes[rank])
    largest = max(Counter(nodes).values())
    distance = largest if largest < len(nodes) else 1
    keeper_of = {rank: by_node[(place + distance) % len(nodes)] for place, rank in enumerate(by_node)}
    return [keeper_of[rank] for rank in range(len(nodes))]
