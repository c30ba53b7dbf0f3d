"""Topology: which rank is which stage, or which span, of which replica.

    2 replicas x 3 stages      stage 0   stage 1   stage 2
    replica 0                  rank 0 -> rank 1 -> rank 2
    replica 1                  rank 3 -> rank 4 -> rank 5

Neighboring stages have consecutive ranks, so they share a node where possible. The ranks of a column hold the same
blocks and all-reduce their gradients. With `adjacent="replicas"` the ranks are numbered column by column:

    replica 0                  rank 0 -> rank 2 -> rank 4
    replica 1                  rank 1 -> rank 3 -> rank 5

Ranks 0 and 1 are then stage 0 of replicas 0 and 1, and share a node where possible.

Spans are numbered like stages. Each holds all blocks, so all ranks reduce their gradients together.
"""

from dataclasses import dataclass
from typing import Literal

from stretto.base.errors import PlanError


@dataclass(frozen=True)
class GridPosition:
    """The replica and stage of one rank, or its replica and span."""

    replica: int
    stage: int
    span: int | None = None  # None if there is only one

    def __str__(self) -> str:
        return f"replica {self.replica}, " + (f"stage {self.stage}" if self.span is None else f"span {self.span}")


@dataclass(frozen=True)
class Topology:
    """The grid of replicas and stages, or of replicas and spans, and how ranks are numbered in it."""

    num_replicas: int
    num_stages: int
    adjacent: Literal["stages", "replicas"] = "stages"  # which neighbors have consecutive ranks
    num_spans: int = 1  # more than one only with one stage

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.num_replicas * self.num_columns

    @property
    def num_columns(self) -> int:
        """The number of ranks of a replica: its stages or its spans."""
        return self.num_stages * self.num_spans

    def rank(self, replica: int, column: int) -> int:
        """Return the rank that holds a stage, or a span, of a replica."""
        if self.adjacent == "stages":
            return replica * self.num_columns + column
        return column * self.num_replicas + replica

    def position(self, rank: int) -> GridPosition:
        """Return a rank's replica and stage, or its replica and span."""
        if not 0 <= rank < self.size:
            kind = "stages" if self.num_spans == 1 else "spans"
            raise PlanError(
                f"rank {rank} does not exist in a grid of {self.num_replicas} x {self.num_columns} (replicas x {kind});"
                f" use 0 to {self.size - 1}"
            )
        if self.adjacent == "stages":
            replica, column = divmod(rank, self.num_columns)
        else:
            column, replica = divmod(rank, self.num_replicas)
        return GridPosition(replica, column) if self.num_spans == 1 else GridPosition(replica, 0, column)

    def replica_ranks(self, replica: int) -> list[int]:
        """Return the ranks of one replica, by stage or span."""
        return [self.rank(replica, column) for column in range(self.num_columns)]

    def stage_ranks(self, stage: int) -> list[int]:
        """Return the ranks that hold one stage, by replica; all ranks if there are spans."""
        if self.num_spans > 1:
            return list(range(self.size))
        return [self.rank(replica, stage) for replica in range(self.num_replicas)]

    def peer_ranks(self, rank: int) -> list[int]:
        """Return all ranks of the same replica or the same stage, this one included: a training step needs them all."""
        position = self.position(rank)
        return sorted({*self.replica_ranks(position.replica), *self.stage_ranks(position.stage)})
