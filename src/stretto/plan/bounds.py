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
        overhead, host = costs.profile.action_overhead, self._host_seconds
        # A block that looks ahead takes all chunks at once, which is cheaper.
        chunks = 1 if any(costs.looks_ahead(layout)) else layout.chunks
        total = 0.0
        for shapes in self.workload.count_chunks(layout.replicas, layout.micro_batches, max(chunks, layout.spans)):
            work = 0.0
            for (rows, steps), count in shapes.items():
                chunk = costs.chunk_cost(0, num_blocks, rows, steps)
                work += count * (chunk.forward + chunk.backward)
            # A stage runs each chunk forward and backward, once per run of blocks; a span has one of each micro-batch.
            num_chunks = layout.micro_batches if layout.spans > 1 else shapes.total()
            num_actions = 2 * num_chunks * (layout.num_runs // layout.stages)
            work = work / (layout.stages * layout.spans) + num_actions * overhead
            total += max(work, num_actions * host)
        optimizer = costs.optimizer_seconds(0, num_blocks) / layout.stages  # each span updates all weights
        return (total / len(self.workload.batches) + optimizer) / self._solo_speed(layout)

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

    @property
    def _host_seconds(self) -> float:
        """The least seconds of an action; 0 if some of a chunk's work is moved to another one."""
        return 0.0 if self.costs.profile.row_loss else self.costs.profile.host_seconds

    def _solo_speed(self, layout: Layout) -> float:
        """Return the speed of a rank that computes alone; no rank is faster."""
        return self.costs.contention.relative_speed(self.cluster.ranks_on_node(layout), num_busy=1)

    def _pipeline_bound(self, layout: Layout, shapes: Counter[tuple[int, int]], latency: float) -> float:
        """Return a bound for one batch: the largest sum of a stage's work and one chunk's time in the other stages.

        With several micro-batches, only earlier stages count. `shapes` counts the batch's chunks by (rows, time steps).
        """
        work, transit = [], []  # seconds per run of blocks: for all chunks; for one, forward and backward with messages
        num_forwards = 1 if layout.recompute else 0  # in each backward
        overhead, host = self.costs.profile.action_overhead, self._host_seconds
        for part in partition_from_counts(layout.blocks):
            own = own_blocks(self.costs, layout, part)
            accumulate = self.costs.accumulate_seconds(own.start, own.stop)
            chunks = [self.costs.chunk_cost(own.start, own.stop, *shape) for shape in shapes]
            forwards = [max(chunk.forward + overhead, host) for chunk in chunks]
            backwards = [chunk.backward + num_forwards * chunk.forward + overhead for chunk in chunks]
            seconds = [
                forward + max(backward + accumulate, host)
                for forward, backward in zip(forwards, backwards, strict=True)
            ]
            compute = sum(count * both for both, count in zip(seconds, shapes.values(), strict=True))
            # The first backward has nothing to add to.
            work.append(compute - accumulate + self._head_bound(layout, shapes))
            # The chunks of the first forward and the last backward can have different shapes, so take the cheapest.
            transit.append(min(forwards) + max(min(backwards), host) + 2 * latency)
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
