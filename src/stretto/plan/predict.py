"""Predicting a step in a layout, by simulating one replica with the schedules that run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial

from stretto.config.layout import Layout
from stretto.plan.actions import Action, ActionKind
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.cut import MicroBatchShape
from stretto.plan.memory import RankMemory, rank_memory
from stretto.plan.partition import partition_from_counts
from stretto.plan.schedule import stage_schedule
from stretto.plan.simulator import ActionCost, simulate
from stretto.plan.timeline import Timeline
from stretto.plan.workload import Workload

# DDP's reducer all-reduces gradients in buckets of this size; no backward is left to overlap with the last one.
_BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class StagePrediction:
    """The prediction for one stage of a replica."""

    blocks: tuple[int, int]
    busy: float  # seconds per step in which it computes
    memory: RankMemory


@dataclass(frozen=True)
class Prediction:
    """How long a step takes in a layout, and what it consists of."""

    layout: Layout
    seconds: float
    pipeline: float  # seconds of forwards and backwards, waiting included
    all_reduce: float  # seconds of the gradients' all-reduce that don't overlap with a backward
    optimizer: float
    other: float  # seconds that every step adds once
    bubble: float  # the fraction of the pipeline's time in which stages wait
    tokens: float
    traffic: float  # bytes per step that the busiest rank sends
    stages: tuple[StagePrediction, ...]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def memory(self) -> float:
        """Bytes of the rank that needs most."""
        return max(stage.memory.total for stage in self.stages)


@dataclass(frozen=True)
class _StepSimulation:
    """One step of one replica in a layout."""

    costs: CostModel
    layout: Layout
    cluster: Cluster
    parts: Sequence[slice]
    micro_batches: Sequence[MicroBatchShape]

    @property
    def num_chunks(self) -> int:
        return max(len(shape.chunk_bounds) for shape in self.micro_batches)

    @cached_property
    def shapes(self) -> list[list[tuple[int, int]]]:
        """Steps and rows of each chunk of each micro-batch."""
        return [[shape.chunk(index) for index in range(self.num_chunks)] for shape in self.micro_batches]

    def schedules(self) -> list[list[Action]]:
        """The schedule of each stage, as its engine runs it."""
        schedules = []
        for stage in range(self.layout.stages):
            actions = stage_schedule(stage, self.layout.stages, len(self.micro_batches), self.num_chunks)
            # Micro-batches that end early have no rows in their last chunks.
            schedules.append([action for action in actions if self.shapes[action.micro_batch][action.chunk][1]])
        return schedules

    def cost(self) -> ActionCost:
        """Return the seconds of each action on a stage that has a device for itself."""
        costs, overhead = self.costs, self.costs.profile.action_overhead
        last_chunk = len(self.micro_batches[0].chunk_bounds) - 1
        recompute = self.layout.recompute
        shapes = self.shapes
        chunks = [cache(partial(costs.chunk, part.start, part.stop)) for part in self.parts]
        accumulate = [costs.accumulate(part.start, part.stop) for part in self.parts]

        def seconds(stage: int, action: Action) -> float:
            steps, rows = shapes[action.micro_batch][action.chunk]
            chunk = chunks[stage](rows, steps)
            if action.kind is ActionKind.FORWARD:
                return chunk.forward + overhead
            # The first backward of a step has no gradient to add to.
            is_first = action.micro_batch == 0 and action.chunk == last_chunk
            recomputation = chunk.forward if recompute else 0.0
            return chunk.backward + recomputation + (0.0 if is_first else accumulate[stage]) + overhead

        return seconds

    def link(self) -> ActionCost:
        """Return the seconds of each message to the next stage."""
        shapes = self.shapes
        boundaries = range(self.layout.stages - 1)
        links = [
            self.costs.network if self.cluster.crosses_nodes(self.layout, stage) else self.costs.node
            for stage in boundaries
        ]
        sizes = [self.costs.sent_bytes(self.parts[stage].stop) for stage in boundaries]

        def seconds(stage: int, action: Action) -> float:
            boundary = stage if action.kind is ActionKind.FORWARD else stage - 1
            steps, rows = shapes[action.micro_batch][action.chunk]
            return links[boundary].seconds(sizes[boundary] * rows * steps)

        return seconds

    def simulate(self) -> Timeline:
        speeds = self.costs.speeds
        on_node = self.cluster.ranks_on_node(self.layout)
        # All replicas of a node do the same at the same time.
        copies = max(1, on_node // self.layout.stages)
        return simulate(
            self.schedules(), self.cost(), self.link(), speed=lambda num_busy: speeds.of(on_node, num_busy * copies)
        )

    def traffic(self, stage: int) -> float:
        """Return the bytes that a rank of a stage sends: activations, their gradients, and those of its weights."""
        part, replicas = self.parts[stage], self.layout.replicas
        forward = self.costs.sent_bytes(part.stop) if stage < self.layout.stages - 1 else 0.0
        backward = self.costs.sent_bytes(part.start) if stage else 0.0
        num_steps = sum(steps * rows for chunks in self.shapes for steps, rows in chunks)
        all_reduce = 2 * (replicas - 1) / replicas * self.costs.weight_bytes(part.start, part.stop)
        return (forward + backward) * num_steps + all_reduce


def predict(costs: CostModel, workload: Workload, layout: Layout, cluster: Cluster) -> Prediction:
    """Return the prediction for an average step; `layout.blocks` gives the blocks of each stage."""
    steps = _steps(costs, workload, layout, cluster)
    largest_chunk = workload.largest_chunk(layout.replicas, layout.micro_batches, layout.chunks)
    timelines = [step.simulate() for step in steps]
    parts, busy = steps[0].parts, _mean_busy(timelines)
    ends = [_all_reduce_end(step, timeline) for step, timeline in zip(steps, timelines, strict=True)]
    pipeline = _mean([timeline.seconds for timeline in timelines])
    all_reduce = _mean(ends) - pipeline
    on_node = cluster.ranks_on_node(layout)
    optimizer = max(costs.optimizer(part.start, part.stop) for part in parts) / costs.speeds.of(on_node, on_node)
    # Each step all-reduces a few numbers: losses, counts, the gradient norm.
    num_nodes = math.ceil(layout.num_ranks / cluster.devices_per_node)
    metrics = costs.all_reduce_seconds(8 * 8, layout.num_ranks, num_nodes)
    other = costs.profile.step_overhead / costs.speeds.of(on_node, 1) + metrics
    return Prediction(
        layout=layout,
        seconds=pipeline + all_reduce + optimizer + other,
        pipeline=pipeline,
        all_reduce=all_reduce,
        optimizer=optimizer,
        other=other,
        bubble=_mean([timeline.bubble for timeline in timelines]),
        tokens=workload.tokens,
        traffic=max(_mean([step.traffic(stage) for step in steps]) for stage in range(layout.stages)),
        stages=tuple(
            StagePrediction(
                (part.start, part.stop), busy[stage], rank_memory(costs, layout, stage, part, *largest_chunk)
            )
            for stage, part in enumerate(parts)
        ),
    )


def predict_timeline(costs: CostModel, workload: Workload, layout: Layout, cluster: Cluster) -> Timeline:
    """Return when each action of the first batch's step runs."""
    return _steps(costs, workload, layout, cluster)[0].simulate()


def _steps(costs: CostModel, workload: Workload, layout: Layout, cluster: Cluster) -> list[_StepSimulation]:
    parts = partition_from_counts(layout.blocks or (costs.num_blocks,))
    cuts = workload.cut(layout.replicas, layout.micro_batches, layout.chunks)
    return [_StepSimulation(costs, layout, cluster, parts, micro_batches) for micro_batches in cuts]


def _all_reduce_end(step: _StepSimulation, timeline: Timeline) -> float:
    """Return when the all-reduce of gradients ends on the last stage."""
    layout, costs = step.layout, step.costs
    if layout.replicas == 1:
        return timeline.seconds
    last_actions = {timed.stage: timed for timed in timeline.timed_actions}
    nodes = step.cluster.num_nodes_of_stage(layout)
    on_node = step.cluster.ranks_on_node(layout)
    # All-reduces were measured with only their own ranks on a node; here all ranks of the node run one at once.
    group = max(1, min(layout.replicas, on_node))
    contention = costs.speeds.of(group, group) / costs.speeds.of(on_node, on_node)
    seconds = partial(costs.all_reduce_seconds, num_ranks=layout.replicas, num_nodes=nodes)
    ends = []
    for stage, part in enumerate(step.parts):
        num_bytes = costs.weight_bytes(part.start, part.stop)
        last = last_actions[stage]
        hidden = costs.profile.overlap * (last.stop - last.start)
        exposed = max(seconds(num_bytes) - hidden, seconds(min(num_bytes, _BUCKET_BYTES))) * contention
        ends.append(last.stop + exposed)
    return max(ends)


def _mean_busy(timelines: Sequence[Timeline]) -> list[float]:
    """Return how long each stage computes in an average step."""
    busy = [0.0] * timelines[0].num_stages
    for timeline in timelines:
        for timed in timeline.timed_actions:
            busy[timed.stage] += (timed.stop - timed.start) / len(timelines)
    return busy


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
