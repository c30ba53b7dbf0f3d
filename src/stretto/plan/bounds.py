"""Bounds: the least time that a layout can take, found without simulating it."""

from collections import Counter

from stretto.config.layout import Layout
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.partition import partition_from_counts
from stretto.plan.workload import Workload


class LowerBounds:
    """What no simulation of a layout can be below."""

    def __init__(self, costs: CostModel, workload: Workload, cluster: Cluster) -> None:
        self.costs = costs
        self.workload = workload
        self.cluster = cluster

    def rough(self, layout: Layout) -> float:
        """The least time of any partition: as if work could be cut anywhere."""
        costs, num_blocks = self.costs, self.costs.num_blocks
        total = 0.0
        for shapes in self.workload.chunks(layout.replicas, layout.micro_batches, layout.chunks):
            for (rows, steps), count in shapes.items():
                chunk = costs.chunk(0, num_blocks, rows, steps)
                total += count * (chunk.forward + chunk.backward)
        speed = costs.speeds.of(self.cluster.ranks_on_node(layout), 1)
        mean = total / len(self.workload.windows)
        actions = 2 * costs.profile.action_overhead * layout.micro_batches
        return ((mean + costs.optimizer(0, num_blocks)) / layout.stages + actions) / speed

    def of(self, layout: Layout) -> float:
        """The least time that a mean step can take: the busiest stage never waits but to be filled and drained."""
        # No rank is ever faster than alone.
        speed = self.costs.speeds.of(self.cluster.ranks_on_node(layout), 1)
        latency = min(self.costs.node.latency, self.costs.network.latency)
        total = 0.0
        for shapes in self.workload.chunks(layout.replicas, layout.micro_batches, layout.chunks):
            total += self._of_window(layout, shapes, latency * speed)
        parts = partition_from_counts(layout.blocks)
        optimizer = max(self.costs.optimizer(part.start, part.stop) for part in parts)
        return (total / len(self.workload.windows) + optimizer) / speed

    def _of_window(self, layout: Layout, shapes: Counter[tuple[int, int]], latency: float) -> float:
        """Of one batch: what a stage has to do, and the way of a chunk through the stages before and after it."""
        work, through = [], []
        again = 2 if layout.recompute else 1
        num_chunks, action = shapes.total(), self.costs.profile.action_overhead
        for part in partition_from_counts(layout.blocks):
            chunks = {shape: self.costs.chunk(part.start, part.stop, *shape) for shape in shapes}
            each = sum(count * (again * chunks[s].forward + chunks[s].backward) for s, count in shapes.items())
            added = (num_chunks - 1) * self.costs.accumulate(part.start, part.stop)
            work.append(each + 2 * action * num_chunks + added)
            # What comes through first and what goes back last may be chunks of different shapes.
            least = min(chunk.forward for chunk in chunks.values()) + min(chunk.backward for chunk in chunks.values())
            through.append(least + 2 * action + 2 * latency)
        if layout.micro_batches == 1:
            return max(own + sum(through) - through[stage] for stage, own in enumerate(work))
        # Of several micro-batches, others can be worked on while one is with the stages after this one.
        return max(own + sum(through[:stage]) for stage, own in enumerate(work))
