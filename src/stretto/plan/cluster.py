"""Cluster: how many devices on how many nodes, and which ranks of a layout share a node."""

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from stretto.base.errors import PlanError
from stretto.config.layout import Layout


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, in order."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


@dataclass(frozen=True)
class Cluster:
    """The devices to plan for."""

    devices: int  # on all nodes together
    nodes: int = 1
    memory: float | None = None  # bytes per device; None: as in the profile

    def __post_init__(self) -> None:
        if self.devices < 1 or self.nodes < 1:
            raise PlanError(f"devices={self.devices} and nodes={self.nodes} must be positive; use at least 1 of each")
        if self.devices % self.nodes:
            raise PlanError(
                f"devices={self.devices} is not a multiple of nodes={self.nodes}; count the devices of all nodes"
            )
        if self.memory is not None and not self.memory > 0:
            raise PlanError(f"memory={self.memory} must be positive; set it to the memory of one device in bytes")

    @cached_property
    def devices_per_node(self) -> int:
        return self.devices // self.nodes

    def ranks_on_node(self, layout: Layout) -> int:
        """Return how many ranks the fullest node has."""
        return min(self.devices_per_node, layout.num_ranks)

    def crosses_nodes(self, layout: Layout, column: int) -> bool:
        """Return whether any replica has its stages (or spans) `column` and `column + 1` on different nodes.

        After the last comes the first: if stages are interleaved, they are neighbors too.
        """
        per_node, num_columns = self.devices_per_node, layout.stages * layout.spans
        if layout.num_ranks <= per_node:
            return False
        distance = (column + 1) % num_columns - column
        if layout.adjacent == "stages":
            # Positions within nodes repeat after `per_node` replicas, so checking that many is enough.
            ranks = range(column, min(layout.replicas, per_node) * num_columns, num_columns)
        else:
            ranks = range(column * layout.replicas, (column + 1) * layout.replicas)
            distance *= layout.replicas
        return any(rank // per_node != (rank + distance) // per_node for rank in ranks)

    def num_nodes_of_stage(self, layout: Layout) -> int:
        """Return the largest number of nodes that the copies of one stage are spread over."""
        if layout.spans > 1:  # every rank has a copy of all blocks
            return ceil(layout.num_ranks / self.devices_per_node)
        if layout.adjacent == "stages":
            return min(layout.replicas, ceil(layout.num_ranks / self.devices_per_node))
        # The replicas of a stage can start in the middle of a node and end on another.
        rank_ranges = [(stage * layout.replicas, (stage + 1) * layout.replicas - 1) for stage in range(layout.stages)]
        return max(last // self.devices_per_node - first // self.devices_per_node + 1 for first, last in rank_ranges)
