"""Lower bounds of the time that a layout takes, computed without simulating it."""

from collections import Counter

from stretto.config.layout import Layout
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.partition import partition_from_counts
from stretto.plan.workload import Workload


class LowerBounds:
    """Bounds that no simulation of a layout is below; the search skips layouts whose bound is already too slow."""

    def __init__(self, costs: CostModel, workload: Workload, cluster: Cluster) -> None:
        self.costs = costs
        self.workload = workload
        self.cluster = cluster

    def rough(self, layout: Layout) -> float:
        """Return a bound for every partition of the blocks, as if work could be split anywhere."""
        costs, num_blocks = self.costs, self.costs.num_blocks
        total = 0.0
        for shapes in self.workload.count_chunks(layout.replicas, layout.micro_batches, layout.chunks):
            for (rows, steps), count in shapes.items():
                chunk = costs.chunk(0, num_blocks, rows, steps)
                total += count * (chunk.forward + chunk.backward)
        speed = costs.speeds.of(self.cluster.ranks_on_node(layout), 1)
        mean = total / len(self.workload.windows)
        actions = 2 * costs.profile.action_overhead * layout.micro_batches
        return ((mean + costs.optimizer(0, num_blocks)) / layout.stages + actions) / speed

    def of(self, layout: Layout) -> float:
        """Return a bound for a layout with blocks: the busiest stage only waits while the pipeline fills and drains."""
        # No rank is faster than when it computes alone.
        speed = self.costs.speeds.of(self.cluster.ranks_on_node(layout), 1)
        latency = min(self.costs.node.latency, self.costs.network.latency)
        total = 0.0
        for shapes in self.workload.count_chunks(layout.replicas, layout.micro_batches, layout.chunks):
            total += self._of_window(layout, shapes, latency * speed)
        parts = partition_from_counts(layout.blocks)
        optimizer = max(self.costs.optimizer(part.start, part.stop) for part in parts)
        return (total / len(self.workload.windows) + optimizer) / speed

    def _of_window(self, layout: Layout, shapes: Counter[tuple[int, int]], latency: float) -> float:
        """Bound one step: the work of a stage, and the passage of a chunk through the stages before and after it."""
        work, passage = [], []
        num_forwards = 2 if layout.recompute else 1
        num_chunks, action = shapes.total(), self.costs.profile.action_overhead
        for part in partition_from_counts(layout.blocks):
            chunks = {shape: self.costs.chunk(part.start, part.stop, *shape) for shape in shapes}
            compute = sum(
                count * (num_forwards * chunks[shape].forward + chunks[shape].backward)
                for shape, count in shapes.items()
            )
            accumulate = (num_chunks - 1) * self.costs.accumulate(part.start, part.stop)
            work.append(compute + 2 * action * num_chunks + accumulate)
            # The first chunk forward and the last chunk backward may have different shapes.
            least = min(chunk.forward for chunk in chunks.values()) + min(chunk.backward for chunk in chunks.values())
            passage.append(least + 2 * action + 2 * latency)
        if layout.micro_batches == 1:
            return max(seconds + sum(passage) - passage[stage] for stage, seconds in enumerate(work))
        # With several micro-batches, a stage can work on others while one is with the stages after it.
        return max(seconds + sum(passage[:stage]) for stage, seconds in enumerate(work))
