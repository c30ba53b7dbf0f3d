"""Lower bounds on how long a step takes in a layout, computed without simulating it."""

from collections import Counter

from stretto.config.layout import Layout
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.head_share import head_share, own_blocks, stage_total
from stretto.plan.partition import partition_from_counts
from stretto.plan.workload import Workload


class LowerBounds:
    """Lower bounds on predicted step times; the search skips layouts whose bound is too high to be among the best."""

    def __init__(self, costs: CostModel, workload: Workload, cluster: Cluster) -> None:
        self.costs = costs
        self.workload = workload
        self.cluster = cluster

    def loose_bound(self, layout: Layout) -> float:
        """Return a bound that holds for every partition of the blocks, as if stages could share the work evenly."""
        costs, num_blocks = self.costs, self.costs.num_blocks
        total = 0.0
        # A block that looks ahead takes all chunks at once, which is cheaper.
        chunks = 1 if any(costs.looks_ahead(layout)) else layout.chunks
        chunks = max(chunks, layout.spans)
        for shapes in self.workload.count_chunks(layout.replicas, layout.micro_batches, chunks):
            for (rows, steps), count in shapes.items():
                chunk = costs.chunk_cost(0, num_blocks, rows, steps)
                total += count * (chunk.forward + chunk.backward)
        mean = total / len(self.workload.batches)
        # A short batch can have fewer chunks than `layout.chunks`, but has at least one per micro-batch.
        overhead = 2 * costs.profile.action_overhead * layout.micro_batches
        optimizer = costs.optimizer_seconds(0, num_blocks) / layout.stages  # each span updates all weights
        return (mean / (layout.stages * layout.spans) + optimizer + overhead) / self._solo_speed(layout)

    def tight_bound(self, layout: Layout) -> float:
        """Return a bound for a layout with `blocks`, as if stages waited only while the pipeline fills or drains."""
        if any(self.costs.looks_ahead(layout)) or layout.spans > 1:
            return self.loose_bound(layout)
        speed = self._solo_speed(layout)
        # The result is divided by the speed, but a message takes equally long at any speed: multiply its latency here.
        latency = min(self.costs.intra_node.latency, self.costs.inter_node.latency) * speed
        batches = self.workload.count_chunks(layout.replicas, layout.micro_batches, layout.chunks)
        total = sum(self._pipeline_bound(layout, shapes, latency) for shapes in batches)
        parts = partition_from_counts(layout.blocks)
        updates = [stage_total(self.costs, layout, part, self.costs.optimizer_seconds) for part in parts]
        optimizer = max(sum(updates[stage :: layout.stages]) for stage in range(layout.stages))
        return (total / len(self.workload.batches) + optimizer) / speed

    def _solo_speed(self, layout: Layout) -> float:
        """Return the speed of a rank that computes alone; no rank is faster."""
        return self.costs.contention.relative_speed(self.cluster.ranks_on_node(layout), num_busy=1)

    def _pipeline_bound(self, layout: Layout, shapes: Counter[tuple[int, int]], latency: float) -> float:
        """Return a bound for one batch: the largest sum of a stage's work and one chunk's time in the other stages.

        With several micro-batches, only earlier stages count. `shapes` counts the batch's chunks by (rows, time steps).
        """
        work, transit = [], []  # seconds per run of blocks: for all chunks; for one, forward and backward with messages
        num_forwards = 2 if layout.recompute else 1
        num_chunks, overhead = shapes.total(), self.costs.profile.action_overhead
        for part in partition_from_counts(layout.blocks):
            own = own_blocks(self.costs, layout, part)
            chunk_costs = [self.costs.chunk_cost(own.start, own.stop, *shape) for shape in shapes]
            costs_and_counts = zip(chunk_costs, shapes.values(), strict=True)
            compute = sum(count * (num_forwards * cost.forward + cost.backward) for cost, count in costs_and_counts)
            accumulate = (num_chunks - 1) * self.costs.accumulate_seconds(own.start, own.stop)
            work.append(compute + 2 * overhead * num_chunks + accumulate + self._head_bound(layout, shapes))
            # The chunks of the first forward and the last backward can have different shapes, so take the cheapest.
            cheapest = min(cost.forward for cost in chunk_costs) + min(cost.backward for cost in chunk_costs)
            transit.append(cheapest + 2 * overhead + 2 * latency)
        # A stage can have several runs of blocks. Chunks come to it through the first runs of the stages before it.
        num_stages = layout.stages
        stage_work = [sum(work[stage::num_stages]) for stage in range(num_stages)]
        if layout.splits_vocab:
            return max(stage_work)  # stages work on the head while the pipeline fills
        waits = [sum(transit[:stage]) for stage in range(num_stages)]
        if layout.micro_batches == 1:
            # Between its forwards and its backwards, a stage waits for the last runs of the stages after it.
            last = transit[len(transit) - num_stages :]
            waits = [wait + sum(last[stage + 1 :]) for stage, wait in enumerate(waits)]
        # With several micro-batches, a stage can work on one while the stages after it work on another.
        return max(seconds + wait for seconds, wait in zip(stage_work, waits, strict=True))

    def _head_bound(self, layout: Layout, shapes: Counter[tuple[int, int]]) -> float:
        """Return a stage's share of the work on an output layer that all stages share, for all chunks; 0 if none is."""
        if not layout.splits_vocab:
            return 0.0

        def seconds(start: int, stop: int) -> float:
            costs = {shape: self.costs.chunk_cost(start, stop, *shape) for shape in shapes}
            return sum(count * (costs[shape].forward + costs[shape].backward) for shape, count in shapes.items())

        return head_share(self.costs, layout, seconds)
