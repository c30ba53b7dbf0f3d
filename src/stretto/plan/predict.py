"""Predicts a training step in a layout, by simulating one replica with the schedules that the engine runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial

from stretto.base.errors import PlanError
from stretto.config.layout import Layout
from stretto.plan.actions import Action, ActionKind
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import ChunkCost, CostModel
from stretto.plan.head_schedule import head_schedule
from stretto.plan.head_share import STATISTICS_BYTES, head_share, own_blocks, splits_embedding, stage_total
from stretto.plan.memory import RankMemory, rank_memory
from stretto.plan.micro_batches import MicroBatchShape
from stretto.plan.partition import partition_from_counts
from stretto.plan.run_chain import RunChain, cut_at_look_ahead
from stretto.plan.schedule import chain_schedule
from stretto.plan.simulator import ActionCost, simulate
from stretto.plan.timeline import Timeline
from stretto.plan.workload import Workload

# The bucket size of DDP's reducer. The last bucket's all-reduce has no backward left to overlap with.
_BUCKET_BYTES = 25 * 2**20
# Each step all-reduces about eight float64 numbers: losses, counts, the gradient norm.
_METRICS_BYTES = 8 * 8


@dataclass(frozen=True)
class StagePrediction:
    """The prediction for one stage of a replica."""

    blocks: tuple[int, int]  # start, stop
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
    bubble: float  # the fraction of the pipeline's time in which stages wait for each other; 0 with one stage
    tokens: float  # time steps of all rows of an average global batch
    traffic: float  # bytes per step sent by the rank that sends the most
    stages: tuple[StagePrediction, ...]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def memory(self) -> float:
        """The peak memory of the rank that needs the most, in bytes."""
        return max(stage.memory.total for stage in self.stages)


@dataclass(frozen=True)
class _StepSimulation:
    """One training step of one replica in a layout; `parts` are the ranges of blocks of its stages."""

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
        """The (rows, time steps) of each chunk of each micro-batch; (0, 0) after the end of a short micro-batch."""
        return [[shape.chunk_shape(index) for index in range(self.num_chunks)] for shape in self.micro_batches]

    @cached_property
    def runs(self) -> tuple[RunChain, list[slice]]:
        """The runs of the stages, and the blocks of each: several per stage if some blocks look ahead."""
        return cut_at_look_ahead(self.parts, self.costs.looks_ahead(self.layout), self.layout.stages)

    def shape(self, number: int, action: Action) -> tuple[int, int]:
        """Return the (rows, time steps) that an action of a run works on."""
        if not self.runs[0].whole[number]:
            return self.shapes[action.micro_batch][action.chunk]
        return self.micro_batches[action.micro_batch].whole().chunk_shape(0)

    def schedules(self) -> list[list[Action]]:
        """Return the schedule of each stage, as the engine runs it."""
        schedules = []
        for stage in range(self.layout.stages):
            if self.layout.splits_vocab:
                chunk_counts = [len(shape.chunk_bounds) for shape in self.micro_batches]
                is_tied = splits_embedding(self.costs, self.layout)
                schedules.append(head_schedule(stage, self.layout.stages, chunk_counts, is_tied=is_tied))
                continue
            actions = chain_schedule(self.runs[0], stage, len(self.micro_batches), self.num_chunks)
            # Micro-batches that end early have no rows in their last chunks.
            schedules.append([action for action in actions if self.shapes[action.micro_batch][action.chunk][0]])
        return schedules

    def action_cost(self) -> ActionCost:
        """Return a function that gives how many seconds an action takes on a stage whose rank computes alone."""
        costs, overhead = self.costs, self.costs.profile.action_overhead
        host = self.costs.profile.host_seconds
        last_chunk = len(self.micro_batches[0].chunk_bounds) - 1
        shapes, recompute = self.shapes, self.layout.recompute
        chain, run_parts = self.runs
        own = [own_blocks(costs, self.layout, part) for part in run_parts]
        chunk_costs = [cache(partial(costs.chunk_cost, part.start, part.stop)) for part in own]
        accumulate = [costs.accumulate_seconds(part.start, part.stop) for part in own]
        embedding_cost = cache(partial(costs.chunk_cost, 0, 1))
        head_cost = cache(partial(costs.chunk_cost, costs.num_blocks - 1, costs.num_blocks))
        head_accumulate = head_share(costs, self.layout, costs.accumulate_seconds)

        def head_seconds(action: Action) -> float:
            head = head_cost(*shapes[action.micro_batch][action.chunk])
            if action.kind is ActionKind.HEAD:
                return max(head.forward / self.layout.stages + overhead, host)
            is_first = action.micro_batch == 0 and action.chunk == 0
            return max(head.backward / self.layout.stages + (0.0 if is_first else head_accumulate) + overhead, host)

        def lookup_seconds(action: Action) -> float:
            # Each stage writes the vectors of all tokens, but adds only those of its rows to a gradient.
            embedding = embedding_cost(*shapes[action.micro_batch][action.chunk])
            is_lookup = action.kind is ActionKind.EMBEDDING
            work = embedding.forward if is_lookup else embedding.backward / self.layout.stages
            return max(work + overhead, host)

        def seconds(stage: int, action: Action) -> float:
            if action.kind in (ActionKind.HEAD, ActionKind.HEAD_GRADIENT):
                return head_seconds(action)
            if action.kind in (ActionKind.EMBEDDING, ActionKind.EMBEDDING_GRADIENT):
                return lookup_seconds(action)
            number = chain.number(stage, action)
            is_whole = chain.whole[number]
            chunk = chunk_costs[number](*self.shape(number, action))
            block_forward = chunk.forward
            if costs.profile.row_loss and number == len(own) - 1 and not is_whole:
                chunk, block_forward = self._move_row_loss(action, chunk)
            if action.kind is ActionKind.FORWARD:
                return max(chunk.forward + overhead, host)
            # The first backward of a step has no gradient to add to.
            is_first = action.micro_batch == 0 and (is_whole or action.chunk == last_chunk)
            recomputation = block_forward if recompute else 0.0
            return max(chunk.backward + recomputation + (0.0 if is_first else accumulate[number]) + overhead, host)

        return seconds

    def _move_row_loss(self, action: Action, chunk: ChunkCost) -> tuple[ChunkCost, float]:
        """Return the cost of a chunk of the last stage, and the seconds of its blocks' forward.

        A loss over whole rows is not part of each chunk: all of it is in the last chunk of a micro-batch.
        """
        shape = self.micro_batches[action.micro_batch]
        part = self.costs.loss_cost(*self.shapes[action.micro_batch][action.chunk])
        forward, backward = chunk.forward - part.forward, chunk.backward - part.backward
        if action.chunk < len(shape.chunk_bounds) - 1:
            return ChunkCost(forward, backward, chunk.saved), forward
        whole = self.costs.loss_cost(shape.stop - shape.start, shape.chunk_bounds[-1][1])
        return ChunkCost(forward + whole.forward, backward + whole.backward, chunk.saved), forward

    def message_cost(self) -> ActionCost:
        """Return a function that gives how many seconds the message that is sent after an action takes."""
        boundaries = range(self.layout.stages - 1)
        links = [
            self.costs.inter_node if self.cluster.crosses_nodes(self.layout, stage) else self.costs.intra_node
            for stage in boundaries
        ]
        sizes = [self.costs.sent_bytes(self.parts[stage].stop) for stage in boundaries]
        # A collective of all stages is as slow as its slowest link.
        slowest = max(links, key=lambda link: link.seconds(1e6), default=self.costs.intra_node)
        hidden_bytes = self.costs.sent_bytes(self.costs.num_blocks - 1) if self.layout.splits_vocab else 0.0
        vector_bytes = self.costs.sent_bytes(1)

        def seconds(stage: int, action: Action) -> float:
            kind, (num_rows, num_time_steps) = action.kind, self._message_shape(stage, action)
            boundary = stage if kind is ActionKind.FORWARD else stage - 1
            if kind in (ActionKind.FORWARD, ActionKind.BACKWARD) and 0 <= boundary < len(links):
                return links[boundary].seconds(sizes[boundary] * num_rows * num_time_steps)
            # The vectors of tokens, and their gradient after the first stage's backward, are those of the embedding.
            num_bytes = vector_bytes if kind in (ActionKind.EMBEDDING, ActionKind.BACKWARD) else hidden_bytes
            if kind is ActionKind.HEAD:
                num_bytes = STATISTICS_BYTES / self.costs.stride
            return slowest.seconds(num_bytes * num_rows * num_time_steps)

        return seconds

    def _message_shape(self, stage: int, action: Action) -> tuple[int, int]:
        """Return the (rows, time steps) of the message after an action: a chunk, unless both sides look ahead."""
        if action.kind not in (ActionKind.FORWARD, ActionKind.BACKWARD):
            return self.shapes[action.micro_batch][action.chunk]
        chain, number = self.runs[0], self.runs[0].number(stage, action)
        edge = number + 1 if action.kind is ActionKind.FORWARD else number
        if 0 < edge < len(chain.stages) and chain.is_edge_whole(edge):
            return self.shape(number, action)
        return self.shapes[action.micro_batch][action.chunk]

    def simulate(self) -> Timeline:
        num_on_node = self.cluster.ranks_on_node(self.layout)
        # Assume that all replicas on a node run the same actions at the same time.
        replicas_on_node = max(1, num_on_node // self.layout.stages)

        def speed(num_busy: int) -> float:
            return self.costs.contention.relative_speed(num_on_node, num_busy=num_busy * replicas_on_node)

        chain = self.runs[0] if any(self.runs[0].whole) else None
        return simulate(self.schedules(), self.action_cost(), self.message_cost(), speed=speed, chain=chain)

    def tied_weights(self) -> list[tuple[list[int], int]]:
        """Return the stages that hold each weight of more than one stage, and its bytes."""
        weights = []
        for tie in self.costs.profile.tied:
            if splits_embedding(self.costs, self.layout) and 0 in tie.blocks:
                continue  # each stage has its own rows of the table
            holders = [
                stage
                for stage, part in enumerate(self.parts)
                if any(part.start <= index < part.stop for index in tie.blocks)
            ]
            if len(holders) > 1:
                weights.append((holders, tie.weight_bytes))
        return weights

    def tied_seconds(self) -> float:
        """Return how long it takes to sum the gradients of tied weights over stages, after all backwards."""
        seconds = 0.0
        for holders, num_bytes in self.tied_weights():
            crossings = [self.cluster.crosses_nodes(self.layout, stage) for stage in range(min(holders), max(holders))]
            num_nodes = min(len(holders), 1 + sum(crossings))
            seconds += self.costs.all_reduce_seconds(num_bytes, len(holders), num_nodes)
        return seconds

    def traffic(self, stage: int) -> float:
        """Return the bytes that a rank of a stage sends: activations, their gradients, and its weights' gradients."""
        part, replicas = self.parts[stage], self.layout.replicas
        forward = self.costs.sent_bytes(part.stop) if stage < self.layout.stages - 1 else 0.0
        backward = self.costs.sent_bytes(part.start) if stage else 0.0
        num_tokens = sum(rows * time_steps for chunk_shapes in self.shapes for rows, time_steps in chunk_shapes)
        weights = stage_total(self.costs, self.layout, part, self.costs.weight_bytes)
        all_reduce = 2 * (replicas - 1) / replicas * weights  # in a ring
        for holders, num_bytes in self.tied_weights():
            all_reduce += 2 * (len(holders) - 1) / len(holders) * num_bytes if stage in holders else 0.0
        return (forward + backward + self._head_bytes(stage)) * num_tokens + all_reduce

    def _head_bytes(self, stage: int) -> float:
        """Return the bytes per row and time step that a stage sends for a split head."""
        if not self.layout.splits_vocab:
            return 0.0
        num_others = self.layout.stages - 1
        hidden = self.costs.sent_bytes(self.costs.num_blocks - 1)
        # The last stage sends hidden states to all others; each of these sends it their gradient.
        total = STATISTICS_BYTES / self.costs.stride * num_others + hidden * (num_others if stage == num_others else 1)
        if splits_embedding(self.costs, self.layout):
            # Each of the others sends the first stage vectors, and gets their gradient from it.
            total += self.costs.sent_bytes(1) * (1 if stage else num_others)
        return total


def predict(costs: CostModel, workload: Workload, layout: Layout, cluster: Cluster) -> Prediction:
    """Return the prediction for an average step; if the layout has several stages, its `blocks` must be set."""
    simulations = _simulations(costs, workload, layout, cluster)
    largest_chunk = workload.largest_chunk(layout.replicas, layout.micro_batches, layout.chunks)
    timelines = [step.simulate() for step in simulations]
    parts, busy = simulations[0].parts, _mean_busy(timelines)
    memory = [rank_memory(costs, layout, stage, part, *largest_chunk) for stage, part in enumerate(parts)]
    ends = [_all_reduce_end(step, timeline) for step, timeline in zip(simulations, timelines, strict=True)]
    pipeline = _mean([timeline.seconds for timeline in timelines])
    all_reduce = _mean(ends) - pipeline + simulations[0].tied_seconds()
    num_on_node = cluster.ranks_on_node(layout)
    speed = partial(costs.contention.relative_speed, num_on_node)
    updates = [stage_total(costs, layout, part, costs.optimizer_seconds) for part in parts]
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
        traffic=max(_mean([step.traffic(stage) for step in simulations]) for stage in range(layout.stages)),
        stages=tuple(StagePrediction((part.start, part.stop), busy[i], memory[i]) for i, part in enumerate(parts)),
    )


def predict_timeline(costs: CostModel, workload: Workload, layout: Layout, cluster: Cluster) -> Timeline:
    """Return when each action runs in the step on the workload's first batch."""
    return _simulations(costs, workload, layout, cluster)[0].simulate()


def _simulations(costs: CostModel, workload: Workload, layout: Layout, cluster: Cluster) -> list[_StepSimulation]:
    if layout.is_interleaved:
        raise PlanError(f"layout.interleave={layout.interleave} is not predicted; predict it with interleave=1")
    parts = partition_from_counts(layout.blocks or (costs.num_blocks,))
    batches = workload.split(layout.replicas, layout.micro_batches, layout.chunks)
    return [_StepSimulation(costs, layout, cluster, parts, micro_batches) for micro_batches in batches]


def _all_reduce_end(step: _StepSimulation, timeline: Timeline) -> float:
    """Return the time at which every stage has finished its all-reduce of gradients."""
    layout, costs = step.layout, step.costs
    if layout.replicas == 1:
        return timeline.seconds
    last_actions = {timed.stage: timed for timed in timeline.timed_actions}  # sorted by time, so the last one stays
    num_nodes = step.cluster.num_nodes_of_stage(layout)
    num_on_node = step.cluster.ranks_on_node(layout)
    # An all-reduce was measured while only its own ranks ran. Here all ranks of the node run one at the same time.
    num_in_group = max(1, min(layout.replicas, num_on_node))
    speed = costs.contention.relative_speed
    slowdown = speed(num_in_group, num_busy=num_in_group) / speed(num_on_node, num_busy=num_on_node)
    duration = partial(costs.all_reduce_seconds, num_ranks=layout.replicas, num_nodes=num_nodes)
    # The gradient of a split embedding is complete only after the last backward, so nothing overlaps with it.
    overlap = 0.0 if splits_embedding(costs, layout) else costs.profile.overlap
    ends = []
    for stage, part in enumerate(step.parts):
        num_bytes = stage_total(costs, layout, part, costs.weight_bytes)
        last = last_actions[stage]
        overlapped = overlap * (last.stop - last.start)
        exposed = max(duration(num_bytes) - overlapped, duration(min(num_bytes, _BUCKET_BYTES))) * slowdown
        ends.append(last.stop + exposed)
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
