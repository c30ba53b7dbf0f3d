"""Mesh: one rank's position in the grid of replicas and stages, with the process groups that it needs there."""

from dataclasses import replace

import torch.distributed as dist

from stretto.base.errors import MeshError
from stretto.mesh.channel import Channel
from stretto.mesh.topology import Topology
from stretto.mesh.world import World


class Mesh:
    """This rank's replica and stage, the channels to its neighbors and the group that reduces its gradients.

    Each pair of neighbors has one process group per direction. On NCCL each group is a communicator with an order of
    its own, so a receive that is posted ahead delays only later messages from the same neighbor.

        stage 0 ──forward──► stage 1 ──forward──► stage 2     replica 0
                ◄─backward──         ◄─backward──
           ▲                    ▲                    ▲
           │ replica_group      │                    │        gradients of a stage are summed over its column
           ▼                    ▼                    ▼
        stage 0 ──forward──► stage 1 ──forward──► stage 2     replica 1
    """

    def __init__(self, world: World, topology: Topology) -> None:
        if topology.size != world.size:
            raise MeshError(
                f"{topology.num_replicas} replicas x {topology.num_stages} stages need {topology.size} ranks, "
                f"not {world.size}"
            )
        # With the topology, errors of lost peers name their replica and stage, and only adjacent ranks are pinged.
        self.world = replace(world, topology=topology)
        self.topology = topology
        position = topology.position(world.rank)
        self.replica, self.stage = position.replica, position.stage
        self.num_replicas, self.num_stages = topology.num_replicas, topology.num_stages
        self.forward_channel: Channel | None = None
        self.backward_channel: Channel | None = None
        self.replica_group: dist.ProcessGroup | None = None
        # A rank that has failed by now has published its error, which this raises; new_group would wait for it.
        self.world.barrier()
        with self.world.collective("new_group"):
            self._create_groups()

    @property
    def is_first_stage(self) -> bool:
        """Does this rank's stage read a window's inputs?"""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Does this rank's stage read a window's targets and compute the loss?"""
        return self.stage == self.num_stages - 1

    def _create_groups(self) -> None:
        if self.num_stages > 1:
            above, below = self._neighbor(1), self._neighbor(-1)
            # Even stages connect upwards first, odd ones downwards: first the pairs (0,1), (2,3), ..., then (1,2),
            # (3,4), ... Both ranks of a pair create it at the same time, so no rank waits for a chain of others.
            order = (above, below) if self.stage % 2 == 0 else (below, above)
            groups = {neighbor: self._create_pair_groups(neighbor) for neighbor in order}
            forward_from, backward_to = groups[below]
            forward_to, backward_from = groups[above]
            self.forward_channel = Channel(self.world, (forward_from, below), (forward_to, above))
            self.backward_channel = Channel(self.world, (backward_from, above), (backward_to, below))
        if self.num_replicas > 1:
            self.replica_group = self._create_group(self.topology.stage_ranks(self.stage))

    def _neighbor(self, distance: int) -> int | None:
        """Return the rank of a neighboring stage; None beyond the first and last stage."""
        stage = self.stage + distance
        return self.topology.rank(self.replica, stage) if 0 <= stage < self.num_stages else None

    def _create_pair_groups(self, neighbor: int | None) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Create the forward and the backward group of two neighbors.

        The first and last stage create groups of themselves where they have no neighbor: torch names a group after its
        ranks and the number of groups created before, so every rank must create the same number.
        """
        ranks = [self.world.rank] if neighbor is None else sorted([self.world.rank, neighbor])
        return self._create_group(ranks), self._create_group(ranks)

    def _create_group(self, ranks: list[int]) -> dist.ProcessGroup:
        # Local synchronization: only members take part, so with 4,096 ranks nobody waits for groups of others.
        group = dist.new_group(ranks, timeout=self.world.timeout, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return group
