"""Mesh: one rank's position in the grid of replicas and stages (or spans), with the process groups it needs there."""

import os
from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.base.errors import MeshError
from stretto.mesh.channel import Channel
from stretto.mesh.reduction import LocalGradients
from stretto.mesh.stage_group import StageGroup
from stretto.mesh.topology import Topology
from stretto.mesh.world import World


class Mesh:
    """This rank's replica and stage, the channels to its neighbors and the group that reduces its gradients.

    Each pair of neighbors has one process group per direction. With NCCL each group has its own communicator, which
    runs its operations in order. So a send that waits for its receiver delays only later messages of the same group.

        stage 0 ──forward──► stage 1 ──forward──► stage 2     replica 0
                ◄─backward──         ◄─backward──
           ▲                    ▲                    ▲
           │ replica_group      │                    │        gradients of a stage are summed over its column
           ▼                    ▼                    ▼
        stage 0 ──forward──► stage 1 ──forward──► stage 2     replica 1

    Spans are connected like stages. They all hold the same weights, so the replica group has all ranks.

    `stage_groups` has a group for each of `shared_by`, the sets of stages that hold copies of the same weights, if this
    stage is in it. With `is_ring`, the last and the first stage are neighbors too: chunks pass stages several times.
    """

    def __init__(
        self,
        world: World,
        topology: Topology,
        shared_by: Iterable[tuple[int, ...]] = (),
        *,
        is_ring: bool = False,
    ) -> None:
        if topology.size != world.size:
            kind = "stages" if topology.num_spans == 1 else "spans"
            raise MeshError(
                f"a grid of {topology.num_replicas} x {topology.num_columns} (replicas x {kind}) needs a world size of "
                f"{topology.size}, not {world.size}; change the layout or the number of ranks"
            )
        if topology.num_columns > 1 and world.device.type == "cuda" and os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
            raise MeshError(
                "CUDA_LAUNCH_BLOCKING=1 makes a stage wait until its message is received, and so two stages may wait "
                "for each other forever; unset it, or debug with layout.stages=1"
            )
        # With the topology, a LostPeerError names the lost rank's replica and stage.
        self.world = replace(world, topology=topology)
        if world.watchdog is not None:
            world.watchdog.find_error = self.world.find_fatal_error
        self.topology = topology
        position = topology.position(world.rank)
        self.replica, self.stage = position.replica, position.stage
        self.num_replicas, self.num_stages = topology.num_replicas, topology.num_stages
        self.is_ring = is_ring and self.num_stages > 1
        self.span, self.num_spans = position.span or 0, topology.num_spans
        # The ranks that hold this rank's blocks, and its number among them.
        self.num_copies = self.num_replicas * self.num_spans
        self.copy_index = self.replica * self.num_spans + self.span
        self._copy_ranks = [
            topology.rank(replica, self.stage + span)
            for replica in range(self.num_replicas)
            for span in range(self.num_spans)
        ]
        self.is_first_stage = self.stage == 0  # it reads a window's inputs
        self.is_last_stage = self.stage == self.num_stages - 1  # it reads a window's targets and computes the loss
        self.forward_channel: Channel | None = None
        self.backward_channel: Channel | None = None
        self.replica_group: dist.ProcessGroup | None = None
        self.stage_groups: dict[tuple[int, ...], StageGroup] = {}  # by the stages
        self.local_gradients = LocalGradients()
        self.num_groups = 0  # that this rank has created; the same on every rank
        # If a rank has already failed, the barrier raises its published error; new_group would wait for that rank.
        self.world.barrier()
        with self.world.collective("new_group"):
            self._create_groups()
            for stages in sorted(set(shared_by)):
                self._create_stage_group(stages)

    def broadcast_to_copies(self, tensor: Tensor, source: int) -> None:
        """Replace a tensor on all ranks that hold this rank's blocks with that of number `source` among them."""
        with self.world.collective("broadcast to ranks with the same blocks"):
            dist.broadcast(tensor, self._copy_ranks[source], group=self.replica_group)

    def max_over_copies(self, tensor: Tensor) -> Tensor:
        """Return the maximum of each element over the ranks that hold this rank's blocks; the tensor is overwritten."""
        if self.num_copies > 1:
            with self.world.collective("all_reduce over ranks with the same blocks"):
                dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.replica_group)
        return tensor

    def gather_from_copies(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks that hold this rank's blocks, in the order of their ranks."""
        if self.num_copies == 1:
            return tensor[None]
        parts = [torch.empty_like(tensor) for _ in range(self.num_copies)]
        with self.world.collective("all_gather over ranks with the same blocks"):
            dist.all_gather(parts, tensor, group=self.replica_group)
        return torch.stack(parts)

    def _create_groups(self) -> None:
        if self.topology.num_columns > 1:
            previous, following = self._neighbor(-1), self._neighbor(1)
            # Even stages connect to the next stage first, odd ones to the previous: first the pairs (0,1), (2,3), ...,
            # then (1,2), (3,4), ... So the pairs don't have to connect one after another along the pipeline.
            order = (following, previous) if self._column % 2 == 0 else (previous, following)
            groups = {neighbor: self._create_pair_groups(neighbor) for neighbor in order}
            forward_from, backward_to = groups[previous]
            forward_to, backward_from = groups[following]
            if self.is_ring:
                # With two stages, the two neighbors are one rank, but the groups are others.
                forward, backward = self._create_pair_groups(self._ring_neighbor(), is_ring_end=True)
                if self.is_first_stage:
                    previous, forward_from, backward_to = self._ring_neighbor(), forward, backward
                elif self.is_last_stage:
                    following, forward_to, backward_from = self._ring_neighbor(), forward, backward
            self.forward_channel = Channel(self.world, (forward_from, previous), (forward_to, following))
            self.backward_channel = Channel(self.world, (backward_from, following), (backward_to, previous))
        if self.num_copies > 1:
            self.replica_group = self._create_group(self.topology.stage_ranks(self.stage))

    def _create_stage_group(self, stages: tuple[int, ...]) -> None:
        """Create the group of some stages of this replica, and connect it; a rank that is not in it has its own.

        Like the groups of neighbors: every rank creates the same number of groups.
        """
        is_member = self._column in stages
        ranks = [self.topology.rank(self.replica, stage) for stage in stages] if is_member else [self.world.rank]
        group = self._create_group(ranks)
        if is_member:
            dist.all_reduce(torch.zeros(1, device=self.world.device), group=group)
            self.stage_groups[stages] = StageGroup(self.world, group, ranks)

    @property
    def _column(self) -> int:
        """This rank's number in its replica: of its stage or its span."""
        return self.stage + self.span

    def _neighbor(self, distance: int) -> int | None:
        """Return the rank of the stage or span at this distance; None before the first or after the last."""
        column = self._column + distance
        return self.topology.rank(self.replica, column) if 0 <= column < self.topology.num_columns else None

    def _ring_neighbor(self) -> int | None:
        """Return the rank of the last stage on the first one, and the other way round; None on other stages."""
        if self.is_first_stage:
            return self._neighbor(self.num_stages - 1)
        return self._neighbor(1 - self.num_stages) if self.is_last_stage else None

    def _create_pair_groups(
        self, neighbor: int | None, *, is_ring_end: bool = False
    ) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Create the forward and the backward group of two neighbors, and connect them.

        The first and last stage create groups of only themselves where they have no neighbor: torch names a group after
        its ranks and the number of groups that exist on the rank, so every rank must create the same number of groups.
        """
        rank = self.world.rank
        ranks = [rank] if neighbor is None else sorted([rank, neighbor])
        forward, backward = self._create_group(ranks), self._create_group(ranks)
        if neighbor is not None:
            ranks_of_replica = self.topology.replica_ranks(self.replica)
            is_before = ranks_of_replica.index(rank) < ranks_of_replica.index(neighbor)
            is_before = is_before != is_ring_end  # the last stage sends forward to the first
            self._connect(forward, neighbor, is_sender=is_before)
            self._connect(backward, neighbor, is_sender=not is_before)
        return forward, backward

    def _connect(self, group: dist.ProcessGroup, neighbor: int, *, is_sender: bool) -> None:
        """Send one message. NCCL connects two ranks when they first use a group; in a step, it would wait for both."""
        message = torch.zeros(1, device=self.world.device)
        if is_sender:
            dist.send(message, neighbor, group)
        else:
            dist.recv(message, neighbor, group)

    def _create_group(self, ranks: list[int]) -> dist.ProcessGroup:
        self.num_groups += 1
        return self.world.new_group(ranks)
