"""Topology: which rank is which stage of which replica.

    2 replicas x 3 stages      stage 0   stage 1   stage 2
    replica 0                  rank 0 -> rank 1 -> rank 2
    replica 1                  rank 3 -> rank 4 -> rank 5

Neighboring stages have consecutive ranks, so they share a node where possible. The ranks of a column hold the same
blocks and all-reduce their gradients. With `adjacent="replicas"` the ranks are numbered column by column:

    replica 0                  rank 0 -> rank 2 -> rank 4
    replica 1                  rank 1 -> rank 3 -> rank 5

Ranks 0 and 1 are then stage 0 of replicas 0 and 1, and share a node where possible.
"""

from dataclasses import dataclass
from typing import Literal

from stretto.base.errors import PlanError


@dataclass(frozen=True)
class GridPosition:
    """The replica and stage of one rank."""

    replica: int
    stage: int

    def __str__(self) -> str:
        return f"replica {self.replica}, stage {self.stage}"


@dataclass(frozen=True)
class Topology:
    """The grid of replicas and stages, and how ranks are numbered in it."""

    num_replicas: int
    num_stages: int
    adjacent: Literal["stages", "replicas"] = "stages"  # which neighbors have consecutive ranks

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.num_replicas * self.num_stages

    def rank(self, replica: int, stage: int) -> int:
        """Return the rank that holds a stage of a replica."""
        return replica * self.num_stages + stage if self.adjacent == "stages" else stage * self.num_replicas + replica

    def position(self, rank: int) -> GridPosition:
        """Return a rank's replica and stage."""
        if not 0 <= rank < self.size:
            raise PlanError(
                f"rank {rank} does not exist in a grid of {self.num_replicas} x {self.num_stages} (replicas x stages); "
                f"use 0 to {self.size - 1}"
            )
        if self.adjacent == "stages":
            return GridPosition(*divmod(rank, self.num_stages))
        stage, replica = divmod(rank, self.num_replicas)
        return GridPosition(replica, stage)

    def replica_ranks(self, replica: int) -> list[int]:
        """Return the ranks of one replica, by stage."""
        return [self.rank(replica, stage) for stage in range(self.num_stages)]

    def stage_ranks(self, stage: int) -> list[int]:
        """Return the ranks that hold one stage, by replica."""
        return [self.rank(replica, stage) for replica in range(self.num_replicas)]

    def peer_ranks(self, rank: int) -> list[int]:
        """Return all ranks of the same replica or the same stage, this one included: a training step needs them all."""
        position = self.position(rank)
        return sorted({*self.replica_ranks(position.replica), *self.stage_ranks(position.stage)})
