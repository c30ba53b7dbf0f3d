"""Predict: what a step takes in a layout, by simulating one replica with the orders that run."""

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

# Torch's reducer adds up gradients in buckets of so many bytes; the last one has no backward left to hide behind.
_BUCKET = 25 * 2**20


@dataclass(frozen=True)
class StagePrediction:
    """One stage of a replica."""

    blocks: tuple[int, int]
    busy: float  # seconds of a step in which it computes
    memory: RankMemory


@dataclass(frozen=True)
class Prediction:
    """What a step takes in a layout, and what of it is spent on what."""

    layout: Layout
    seconds: float
    pipeline: float  # forwards and backwards, waiting included
    all_reduce: float  # gradients added up over replicas, as far as no backward hides it
    optimizer: float
    other: float  # what each step adds once
    bubble: float  # the part of the pipeline's time in which its stages wait
    tokens: float
    traffic: float  # bytes that the busiest rank sends
    stages: tuple[StagePrediction, ...]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def memory(self) -> float:
        """Of the fullest rank."""
        return max(stage.memory.total for stage in self.stages)


@dataclass(frozen=True)
class _StepSimulation:
    """One window of a replica in a layout."""

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
        """The actions of each stage, as its engine takes them."""
        found = []
        for stage in range(self.layout.stages):
            actions = stage_schedule(stage, self.layout.stages, len(self.micro_batches), self.num_chunks)
            found.append([action for action in actions if self.shapes[action.micro_batch][action.chunk][1]])
        return found

    def cost(self) -> ActionCost:
        """What an action takes on a stage that has its device for itself."""
        costs, action_seconds = self.costs, self.costs.profile.action_overhead
        last_chunk = len(self.micro_batches[0].chunk_bounds) - 1
        again = self.layout.recompute
        shapes = self.shapes
        chunks = [cache(partial(costs.chunk, part.start, part.stop)) for part in self.parts]
        added = [costs.accumulate(part.start, part.stop) for part in self.parts]

        def seconds(stage: int, action: Action) -> float:
            steps, rows = shapes[action.micro_batch][action.chunk]
            chunk = chunks[stage](rows, steps)
            if action.kind is ActionKind.FORWARD:
                return chunk.forward + action_seconds
            # The first backward finds no gradient that it would have to add to.
            is_first = action.micro_batch == 0 and action.chunk == last_chunk
            repeated = chunk.forward if again else 0.0
            return chunk.backward + repeated + (0.0 if is_first else added[stage]) + action_seconds

        return seconds

    def link(self) -> ActionCost:
        """What a message takes to the next stage."""
        shapes = self.shapes
        inner = range(self.layout.stages - 1)
        links = [
            self.costs.network if self.cluster.crosses_nodes(self.layout, stage) else self.costs.node for stage in inner
        ]
        sizes = [self.costs.sent_bytes(self.parts[stage].stop) for stage in inner]

        def seconds(stage: int, action: Action) -> float:
            lower = stage if action.kind is ActionKind.FORWARD else stage - 1
            steps, rows = shapes[action.micro_batch][action.chunk]
            link = links[lower]
            return link.latency + sizes[lower] * rows * steps / link.bandwidth

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
        """Bytes of activations and gradients of activations that a stage sends."""
        up = self.costs.sent_bytes(self.parts[stage].stop) if stage < self.layout.stages - 1 else 0.0
        down = self.costs.sent_bytes(self.parts[stage].start) if stage else 0.0
        num_steps = sum(
            (stop - first) * rows
            for shape in self.micro_batches
            for (first, stop), rows in zip(shape.chunk_bounds, shape.rows_per_chunk, strict=True)
        )
        return (up + down) * num_steps


def predict(costs: CostModel, workload: Workload, layout: Layout, cluster: Cluster) -> Prediction:
    """Return what a mean step takes; `layout.blocks` says which blocks each stage holds."""
    steps = _steps(costs, workload, layout, cluster)
    timelines = [step.simulate() for step in steps]
    parts, busy = steps[0].parts, _mean_busy(timelines)
    ends = [_end(step, timeline) for step, timeline in zip(steps, timelines, strict=True)]
    pipeline = sum(timeline.seconds for timeline in timelines) / len(timelines)
    added = sum(ends) / len(ends) - pipeline
    speed = costs.speeds.of(cluster.ranks_on_node(layout), cluster.ranks_on_node(layout))
    optimizer = max(costs.optimizer(part.start, part.stop) for part in parts) / speed
    agree = costs.all_reduce_seconds(8 * 8, layout.num_ranks, math.ceil(layout.num_ranks / cluster.devices_per_node))
    other = costs.profile.step_overhead / costs.speeds.of(cluster.ranks_on_node(layout), 1) + agree
    return Prediction(
        layout,
        pipeline + added + optimizer + other,
        pipeline,
        added,
        optimizer,
        other,
        sum(timeline.bubble for timeline in timelines) / len(timelines),
        workload.tokens,
        max(_traffic(steps, stage) for stage in range(layout.stages)),
        tuple(
            StagePrediction(
                (part.start, part.stop),
                busy[stage],
                stage_memory(costs, workload, layout, stage, part),
            )
            for stage, part in enumerate(parts)
        ),
    )


def predict_timeline(costs: CostModel, workload: Workload, layout: Layout, cluster: Cluster) -> Timeline:
    """Return when each action of the first window's step runs."""
    return _steps(costs, workload, layout, cluster)[0].simulate()


def stage_memory(costs: CostModel, workload: Workload, layout: Layout, stage: int, part: slice) -> RankMemory:
    """Return the memory of a stage, for the largest chunks that any window has."""
    rows, steps = workload.largest_chunk(layout.replicas, layout.micro_batches, layout.chunks)
    return rank_memory(costs, layout, stage, part, rows, steps)


def _steps(costs: CostModel, workload: Workload, layout: Layout, cluster: Cluster) -> list[_StepSimulation]:
    parts = partition_from_counts(layout.blocks or (costs.num_blocks,))
    cuts = workload.cut(layout.replicas, layout.micro_batches, layout.chunks)
    return [_StepSimulation(costs, layout, cluster, parts, micro_batches) for micro_batches in cuts]


def _end(step: _StepSimulation, timeline: Timeline) -> float:
    """When the gradients of the last stage to be ready are added up."""
    layout, costs = step.layout, step.costs
    if layout.replicas == 1:
        return timeline.seconds
    last = {span.stage: span for span in timeline.timed_actions}
    nodes = step.cluster.num_nodes_of_stage(layout)
    on_node = step.cluster.ranks_on_node(layout)
    # Sums were measured with those ranks alone on a node; here all its ranks add up at once.
    group = max(1, min(layout.replicas, on_node))
    contention = costs.speeds.of(group, group) / costs.speeds.of(on_node, on_node)
    seconds = partial(costs.all_reduce_seconds, num_ranks=layout.replicas, num_nodes=nodes)
    ends = []
    for stage, part in enumerate(step.parts):
        num_bytes = costs.weight_bytes(part.start, part.stop)
        span = last[stage]
        hidden = costs.profile.overlap * (span.stop - span.start)
        exposed = max(seconds(num_bytes) - hidden, seconds(min(num_bytes, _BUCKET))) * contention
        ends.append(span.stop + exposed)
    return max(ends)


def _traffic(steps: Sequence[_StepSimulation], stage: int) -> float:
    layout = steps[0].layout
    part = steps[0].parts[stage]
    gradients = 2 * (layout.replicas - 1) / layout.replicas * steps[0].costs.weight_bytes(part.start, part.stop)
    return gradients + sum(step.traffic(stage) for step in steps) / len(steps)


def _mean_busy(timelines: Sequence[Timeline]) -> list[float]:
    """How long each stage computes in a mean step."""
    busy = [0.0] * timelines[0].num_stages
    for timeline in timelines:
        for span in timeline.timed_actions:
            busy[span.stage] += (span.stop - span.start) / len(timelines)
    return busy
