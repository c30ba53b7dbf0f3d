"""StageSimulation: a training step of one replica whose stages hold runs of blocks, as the engine runs it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial

from stretto.config.layout import Layout
from stretto.plan.actions import Action, ActionKind
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import ChunkCost, CostModel
from stretto.plan.head_schedule import head_schedule
from stretto.plan.head_share import STATISTICS_BYTES, head_share, own_blocks, splits_embedding, stage_total
from stretto.plan.micro_batches import MicroBatchShape
from stretto.plan.placement import link_after, shared_speed
from stretto.plan.run_chain import RunChain, cut_at_look_ahead
from stretto.plan.schedule import chain_schedule
from stretto.plan.simulator import ActionCost, simulate
from stretto.plan.timeline import Timeline


@dataclass(frozen=True)
class StageSimulation:
    """One training step of one replica in a layout; `parts` are the ranges of blocks of its stages.

    With `interleave`, part i is one of several of stage i mod `layout.stages`.
    """

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

    def held_blocks(self, stage: int) -> Sequence[slice]:
        """Return the ranges of blocks that a stage holds."""
        return self.parts[stage :: self.layout.stages]

    @cached_property
    def runs(self) -> tuple[RunChain, list[slice]]:
        """The runs of the stages, and the blocks of each: several per stage if interleaved, or if some look ahead."""
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
        chain, run_parts = self.runs
        # By the number of the run that receives activations: the link from the stage before it, and bytes.
        edges = [number for number in range(1, len(chain.stages)) if chain.is_message(number)]
        stages_before = {number: chain.stages[number - 1] for number in edges}
        links = {
            number: link_after(self.costs, self.cluster, self.layout, stage) for number, stage in stages_before.items()
        }
        sizes = {number: self.costs.sent_bytes(run_parts[number].start) for number in edges}
        # A collective of all stages is as slow as its slowest link.
        slowest = max(links.values(), key=lambda link: link.seconds(1e6), default=self.costs.intra_node)
        hidden_bytes = self.costs.sent_bytes(self.costs.num_blocks - 1) if self.layout.splits_vocab else 0.0
        vector_bytes = self.costs.sent_bytes(1)

        def seconds(stage: int, action: Action) -> float:
            kind = action.kind
            if kind is ActionKind.FORWARD or kind is ActionKind.BACKWARD:
                number = chain.number(stage, action)
                edge = number + 1 if kind is ActionKind.FORWARD else number
                if edge in links:
                    num_rows, num_time_steps = self._message_shape(number, edge, action)
                    return links[edge].seconds(sizes[edge] * num_rows * num_time_steps)
            num_rows, num_time_steps = self.shapes[action.micro_batch][action.chunk]
            # The vectors of tokens, and their gradient after the first stage's backward, are those of the embedding.
            num_bytes = vector_bytes if kind in (ActionKind.EMBEDDING, ActionKind.BACKWARD) else hidden_bytes
            if kind is ActionKind.HEAD:
                num_bytes = STATISTICS_BYTES / self.costs.stride
            return slowest.seconds(num_bytes * num_rows * num_time_steps)

        return seconds

    def _message_shape(self, number: int, edge: int, action: Action) -> tuple[int, int]:
        """Return the (rows, time steps) of the message after an action: a chunk, unless both sides look ahead."""
        if self.runs[0].is_edge_whole(edge):
            return self.shape(number, action)
        return self.shapes[action.micro_batch][action.chunk]

    def simulate(self) -> Timeline:
        """Return when each action of each stage runs."""
        speed = shared_speed(self.costs, self.cluster, self.layout)
        # Without it, a simulation is faster.
        chain = self.runs[0] if any(self.runs[0].whole) or self.runs[0].is_interleaved else None
        return simulate(self.schedules(), self.action_cost(), self.message_cost(), speed=speed, chain=chain)

    def tied_weights(self) -> list[tuple[list[int], int]]:
        """Return the stages that hold each weight of more than one stage, and its bytes."""
        weights = []
        for tie in self.costs.profile.tied:
            if splits_embedding(self.costs, self.layout) and 0 in tie.blocks:
                continue  # each stage has its own rows of the table
            holders = sorted(
                {
                    number % self.layout.stages
                    for number, part in enumerate(self.parts)
                    if any(part.start <= index < part.stop for index in tie.blocks)
                }
            )
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
        parts, replicas = self.held_blocks(stage), self.layout.replicas
        forward = sum(self.costs.sent_bytes(part.stop) for part in parts if part.stop < self.costs.num_blocks)
        backward = sum(self.costs.sent_bytes(part.start) for part in parts if part.start)
        num_tokens = sum(rows * time_steps for chunk_shapes in self.shapes for rows, time_steps in chunk_shapes)
        weights = sum(stage_total(self.costs, self.layout, part, self.costs.weight_bytes) for part in parts)
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
