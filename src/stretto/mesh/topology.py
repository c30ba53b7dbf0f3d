"""Topology: which rank is which stage of which replica.

    2 replicas x 3 stages      stage 0   stage 1   stage 2
    replica 0                  rank 0 -> rank 1 -> rank 2
    replica 1                  rank 3 -> rank 4 -> rank 5

Neighbouring stages are neighbouring ranks, so they share a machine where they can; ranks of one column hold the same
blocks and add up their gradients. With `adjacent` set to replicas it is the columns that are neighbours: rank 0 and rank 1
are then the first stage of both replicas, and share a machine to add up their gradients.
"""

from dataclasses import dataclass
from typing import Literal

from stretto.base.errors import PlanError


@dataclass(frozen=True)
class GridPosition:
    """Where one rank stands."""

    replica: int
    stage: int


@dataclass(frozen=True)
class Topology:
    """A grid of replicas and stages."""

    replicas: int
    stages: int
    adjacent: Literal["stages", "replicas"] = "stages"

    @property
    def size(self) -> int:
        return self.replicas * self.stages

    def rank(self, replica: int, stage: int) -> int:
        """Return the rank of a place."""
        return replica * self.stages + stage if self.adjacent == "stages" else stage * self.replicas + replica

    def position(self, rank: int) -> GridPosition:
        """Return the place of a rank."""
        if not 0 <= rank < self.size:
            raise PlanError(
                f"rank {rank} is not one of the {self.size} of {self.replicas} replicas x {self.stages} stages"
            )
        if self.adjacent == "stages":
            return GridPosition(*divmod(rank, self.stages))
        stage, replica = divmod(rank, self.replicas)
        return GridPosition(replica, stage)

    def replica_ranks(self, replica: int) -> list[int]:
        """Return the ranks of one replica, stage by stage."""
        return [self.rank(replica, stage) for stage in range(self.stages)]

    def stage_ranks(self, stage: int) -> list[int]:
        """Return the ranks that hold one stage, replica by replica."""
        return [self.rank(replica, stage) for replica in range(self.replicas)]
