"""Predicts a training step in a layout, by simulating one replica with the schedules that the engine runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from stretto.config.layout import Layout
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.head_share import splits_embedding, stage_total
from stretto.plan.layout_memory import layout_memory
from stretto.plan.memory import RankMemory
from stretto.plan.partition import partition_from_counts
from stretto.plan.span_simulation import SpanSimulation
from stretto.plan.stage_simulation import StageSimulation
from stretto.plan.timeline import Timeline
from stretto.plan.workload import Workload

# The bucket size of DDP's reducer. The last bucket's all-reduce has no backward left to overlap with.
_BUCKET_BYTES = 25 * 2**20
# Each step all-reduces about eight float64 numbers: losses, counts, the gradient norm.
_METRICS_BYTES = 8 * 8


@dataclass(frozen=True)
class StagePrediction:
    """The prediction for one stage of a replica, or for one span."""

    runs: tuple[tuple[int, int], ...]  # start and stop of each run of blocks: one, or with `interleave` several
    busy: float  # seconds per step in which it computes
    memory: RankMemory


@dataclass(frozen=True)
class Prediction:
    """How long an average training step takes in a layout, and what it consists of."""

    layout: Layout
    seconds: float
    pipeline: float  # seconds that forwards and backwards take, waiting included
    all_reduce: float  # seconds of the gradients' all-reduces that don't overlap with a backward
    optimizer: float  # seconds
    other: float  # seconds that the rest takes: overhead such as reading data, and the all-reduce of metrics
    bubble: float  # the fraction of the pipeline's time in which stages, or spans, wait for each other
    tokens: float  # time steps of all rows of an average global batch
    traffic: float  # bytes per step sent by the rank that sends the most
    stages: tuple[StagePrediction, ...]  # or the spans, if there are some

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def memory(self) -> float:
        """The peak memory of the rank that needs the most, in bytes."""
        return max(stage.memory.total for stage in self.stages)


def predict(costs: CostModel, workload: Workload, layout: Layout, cluster: Cluster) -> Prediction:
    """Return the prediction for an average step; if the layout has several stages, its `blocks` must be set."""
    simulations = _simulations(costs, workload, layout, cluster)
    timelines = [step.simulate() for step in simulations]
    columns = range(layout.stages * layout.spans)
    held_blocks = [simulations[0].held_blocks(column) for column in columns]
    busy = _mean_busy(timelines)
    memory = list(layout_memory(costs, layout, held_blocks, workload))
    ends = [_all_reduce_end(step, timeline) for step, timeline in zip(simulations, timelines, strict=True)]
    pipeline = _mean([timeline.seconds for timeline in timelines])
    all_reduce = _mean(ends) - pipeline + simulations[0].tied_seconds()
    num_on_node = cluster.ranks_on_node(layout)
    speed = partial(costs.contention.relative_speed, num_on_node)
    updates = [
        sum(stage_total(costs, layout, part, costs.optimizer_seconds) for part in parts) for parts in held_blocks
    ]
    optimizer = max(updates) / speed(num_busy=num_on_node)
    num_nodes = math.ceil(layout.num_ranks / cluster.devices_per_node)
    metrics = costs.all_reduce_seconds(_METRICS_BYTES, layout.num_ranks, num_nodes)
    # Assume that ranks don't slow each other down while they read data.
    other = costs.profile.step_overhead / speed(num_busy=1) + metrics
    return Prediction(
        layout=layout,
        seconds=pipeline + all_reduce + optimizer + other,
        pipeline=pipeline,
        all_reduce=all_reduce,
        optimizer=optimizer,
        other=other,
        bubble=_mean([timeline.bubble for timeline in timelines]),
        tokens=workload.tokens,
        traffic=max(_mean([step.traffic(column) for step in simulations]) for column in columns),
        stages=tuple(
            StagePrediction(tuple((part.start, part.stop) for part in parts), busy[column], memory[column])
            for column, parts in enumerate(held_blocks)
        ),
    )


def predict_timeline(costs: CostModel, workload: Workload, layout: Layout, cluster: Cluster) -> Timeline:
    """Return when each action runs in the step on the workload's first batch."""
    return _simulations(costs, workload, layout, cluster)[0].simulate()


def _simulations(
    costs: CostModel, workload: Workload, layout: Layout, cluster: Cluster
) -> Sequence[StageSimulation | SpanSimulation]:
    if layout.spans > 1:
        batches = workload.split(layout.replicas, layout.micro_batches, layout.spans)
        return [SpanSimulation(costs, layout, cluster, micro_batches) for micro_batches in batches]
    parts = partition_from_counts(layout.blocks or (costs.num_blocks,))
    batches = workload.split(layout.replicas, layout.micro_batches, layout.chunks)
    return [StageSimulation(costs, layout, cluster, parts, micro_batches) for micro_batches in batches]


def _all_reduce_end(step: StageSimulation | SpanSimulation, timeline: Timeline) -> float:
    """Return the time at which every rank has finished its all-reduce of gradients."""
    layout, costs = step.layout, step.costs
    num_copies = layout.replicas * layout.spans  # of each stage's weights; spans have all of them
    if num_copies == 1:
        return timeline.seconds
    last_actions = {timed.stage: timed for timed in timeline.timed_actions}  # sorted by time, so the last one stays
    num_nodes = step.cluster.num_nodes_of_stage(layout)
    num_on_node = step.cluster.ranks_on_node(layout)
    # An all-reduce was measured while only its own ranks ran. Here all ranks of the node run one at the same time.
    num_in_group = max(1, min(num_copies, num_on_node))
    speed = costs.contention.relative_speed
    slowdown = speed(num_in_group, num_busy=num_in_group) / speed(num_on_node, num_busy=num_on_node)
    duration = partial(costs.all_reduce_seconds, num_ranks=num_copies, num_nodes=num_nodes)
    # The gradient of a split embedding is complete only after the last backward, so nothing overlaps with it.
    overlap = 0.0 if splits_embedding(costs, layout) else costs.profile.overlap
    ends = []
    for column, last in last_actions.items():
        num_bytes = sum(stage_total(costs, layout, part, costs.weight_bytes) for part in step.held_blocks(column))
        overlapped = overlap * (last.stop - last.start)
        exposed = max(duration(num_bytes) - overlapped, duration(min(num_bytes, _BUCKET_BYTES))) * slowdown
        ends.append(last.stop + exposed)
    # Spans reduce together: the first of them to end waits for the last.
    return max(ends)


def _mean_busy(timelines: Sequence[Timeline]) -> list[float]:
    """Return how many seconds each stage computes in an average step."""
    busy = [0.0] * timelines[0].num_stages
    for timeline in timelines:
        for timed in timeline.timed_actions:
            busy[timed.stage] += (timed.stop - timed.start) / len(timelines)
    return busy


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
