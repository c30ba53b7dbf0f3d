"""Mesh: one rank's place in the grid, with its process groups and the few collectives we need."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.base.errors import LostPeerError, MeshError, StrettoError
from stretto.mesh.channel import WAITING, Channel
from stretto.mesh.topology import Topology
from stretto.mesh.wait_timer import WaitTimer
from stretto.mesh.world import World


class Mesh:
    """This rank's replica and stage, and how it talks to its neighbours. Alone, everything is a no-op.

    Each pair of neighbours has a process group for each direction, so that on NCCL each has a communicator and an order
    of its own: a receive that is posted ahead holds up nothing but what comes after it from the same neighbour.
    Without groups, ranks can only add up and spread what concerns all.
    """

    def __init__(self, world: World, topology: Topology, *, create_groups: bool = True) -> None:
        if topology.size != world.size:
            raise MeshError(
                f"{topology.replicas} replicas x {topology.stages} stages need {topology.size} ranks, not {world.size}"
            )
        self.world = world
        self.topology = topology
        self.wait_timer = WaitTimer(world.device)
        position = topology.position(world.rank)
        self.replica, self.stage = position.replica, position.stage
        own_replica, own_stage = topology.replica_ranks(self.replica), topology.stage_ranks(self.stage)
        self._adjacent_ranks = sorted({*own_replica, *own_stage})
        self.forward_channel: Channel | None = None
        self.backward_channel: Channel | None = None
        self.replica_group: dist.ProcessGroup | None = None
        # All come this far or none: who has failed by now has left word of it, while making a group would just wait.
        self.barrier()
        if create_groups:
            self._run_collective(lambda: self._make_groups(own_stage), "making groups")

    def _make_groups(self, own_stage: list[int]) -> None:
        topology, world = self.topology, self.world
        if topology.stages > 1:
            above, below = self._neighbor(1), self._neighbor(-1)
            # First the pairs (0,1), (2,3), ..., then (1,2), (3,4), ...: both of a pair make it at the same time.
            pairs = {partner: self._make_pair_groups(partner) for partner in self._partners(above, below)}
            up_from, down_to = pairs[below]
            up_to, down_from = pairs[above]
            self.forward_channel = Channel(
                (up_from, below), (up_to, above), self.peer_lost_error, self.wait_timer, world.set_status
            )
            self.backward_channel = Channel(
                (down_from, above), (down_to, below), self.peer_lost_error, self.wait_timer, world.set_status
            )
        if topology.replicas > 1:
            self.replica_group = self._make_group(own_stage)

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.topology.stages - 1

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        """Return the sums of each value over all ranks."""
        if self.world.is_single_rank:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.world.device)
        self._run_collective(lambda: dist.all_reduce(tensor), "adding up")
        return [float(value) for value in tensor.tolist()]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.all_reduce([0.0])

    def gather(self, values: Sequence[float]) -> list[list[float]] | None:
        """Return the values of all ranks, rank by rank, on the first rank; some may give more than others.

        A sum in which each rank has a place of its own: no rank hears from all others one by one. It takes as much
        memory as all values together, on every rank.
        """
        world = self.world
        if world.is_single_rank:
            return [list(values)]
        sizes = torch.zeros(world.size, dtype=torch.int64, device=world.device)
        sizes[world.rank] = len(values)
        self._run_collective(lambda: dist.all_reduce(sizes), "gathering")
        places: list[int] = sizes.tolist()
        tensor = torch.zeros(sum(places), dtype=torch.float64, device=world.device)
        own = torch.tensor(values, dtype=torch.float64)
        torch.split(tensor, places)[world.rank].copy_(own)
        self._run_collective(lambda: dist.all_reduce(tensor), "gathering")
        return [part.tolist() for part in torch.split(tensor.cpu(), places)] if world.is_rank_zero else None

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Return `tensor` as rank `source` has it, on every rank; elsewhere it says only shape and dtype."""
        if not self.world.is_single_rank:
            tensor = tensor.contiguous()
            self._run_collective(lambda: dist.broadcast(tensor, source), "spreading")
        return tensor

    def broadcast_text(self, text: str) -> str:
        """Return a text as the first rank has it, on every rank."""
        own = text.encode() if self.world.is_rank_zero else b""
        (size,) = self.all_reduce([float(len(own))])
        letters = torch.tensor(list(own) if self.world.is_rank_zero else [0] * int(size), dtype=torch.uint8)
        return bytes(self.broadcast(letters.to(self.world.device), 0).tolist()).decode() if size else ""

    def peer_lost_error(self, peer: int, activity: str) -> StrettoError:
        """Return the error for a peer that went away while this rank was doing something with it: its own, if told."""
        told = self.world.peer_error()
        if told is not None:
            return told
        found = self.world.find_lost_rank(self._adjacent_ranks)
        if found is None:
            # All answer, so it was the time that ran out.
            late = self._find_straggler()
            return self._timeout_error(peer if late is None else late, activity)
        return self._lost_peer_error(found, activity)

    def explain_error(self, error: RuntimeError, activity: str) -> Exception:
        """Return the error for a lost peer if one was lost, and else the error as it is: it has a cause of its own."""
        told = self.world.peer_error()
        if told is not None:
            return told
        found = self.world.find_lost_rank(self._adjacent_ranks)
        if found is not None:
            return self._lost_peer_error(found, activity)
        late = self._find_straggler() if "imed out" in str(error) else None
        return error if late is None else self._timeout_error(late, activity)

    def _lost_peer_error(self, rank: int, activity: str) -> LostPeerError:
        if rank == self.world.rank:
            return LostPeerError(
                f"rank {rank} was given up by the others, which could not reach it while it was {activity}; "
                "if the network was cut, start this host's ranks again"
            )
        return LostPeerError(
            f"rank {self.world.rank} lost {self._describe_rank(rank)} while {activity}; "
            "look at that rank's own output for the reason"
        )

    def _find_straggler(self) -> int | None:
        """One of the ranks near this one that isn't waiting for another, where all live and yet none goes on."""
        signs = {rank: self.world.last_status(rank) or "" for rank in self._adjacent_ranks if rank != self.world.rank}
        return next((rank for rank, sign in signs.items() if not sign.startswith(WAITING)), None)

    def _timeout_error(self, rank: int, activity: str) -> LostPeerError:
        return LostPeerError(
            f"rank {self.world.rank} waited {self.world.timeout.total_seconds():.0f} s for {self._describe_rank(rank)} while "
            f"{activity}; that rank lives but doesn't go on: look at its own output, or raise run.timeout"
        )

    def _describe_rank(self, rank: int) -> str:
        """A rank, where it stands, and what it said last."""
        position, sign = self.topology.position(rank), self.world.last_status(rank)
        last = "" if sign is None else f", last seen {sign}"
        return f"rank {rank} (replica {position.replica}, stage {position.stage}{last})"

    def _partners(self, above: int | None, below: int | None) -> tuple[int | None, int | None]:
        return (above, below) if self.stage % 2 == 0 else (below, above)

    def _neighbor(self, step: int) -> int | None:
        stage = self.stage + step
        return self.topology.rank(self.replica, stage) if 0 <= stage < self.topology.stages else None

    def _run_collective(self, run: Callable[[], object], activity: str) -> None:
        self.world.set_status(f"{WAITING} for all ranks, {activity}")
        started = self.wait_timer.begin()
        try:
            run()
        except RuntimeError as error:
            raise self.explain_error(error, activity) from error
        self.wait_timer.end(started)
        self.world.set_status(f"done with {activity}")

    def _make_pair_groups(self, other: int | None) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Make the groups of two neighbours, one for each direction.

        At the end of the line a rank makes them for itself alone: torch names a group by its ranks and by how many
        groups this rank has made before, so all must have made as many.
        """
        own = self.world.rank
        ranks = [own] if other is None else sorted([own, other])
        return self._make_group(ranks), self._make_group(ranks)

    def _make_group(self, ranks: list[int]) -> dist.ProcessGroup:
        # Made by its members alone: with 4,096 ranks nobody waits for groups that are not its own.
        group = dist.new_group(ranks, timeout=self.world.timeout, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return group
