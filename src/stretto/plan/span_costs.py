"""SpanCosts: what each action of a span runs of a model, and what it costs.

A sweep passes its state from span to span; a segment is what runs between two layers of sweeps, on one span alone. The
engine runs a segment in the same action as the sweep that it waits for:

    forward    F0 = segment 0, sweep 0   F1 = sweep 1, segment 1   F2 = sweep 2   F3 = sweep 3, segment 2 with the loss
    backward   B3 = sweep 3              B2 = sweep 2, segment 1   B1 = sweep 1   B0 = sweep 0, segment 0

The backward of the last segment follows the loss at once: in F3, or in H, the action of a loss over whole rows.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import cache

from stretto.base.errors import PlanError
from stretto.config.layout import Layout
from stretto.plan.actions import Action, ActionKind
from stretto.plan.cost_model import ChunkCost, CostModel
from stretto.plan.span_schedule import SpanGrid, SweepShape


class SpanCosts:
    """The costs of a model's sweeps and segments for any number of rows and time steps."""

    def __init__(self, costs: CostModel, layout: Layout) -> None:
        self.costs = costs
        self.sweeps = costs.profile.sweeps
        if not self.sweeps:
            raise PlanError(
                f"layout.spans={layout.spans} is for models with bidirectional or affine blocks that spans can split; "
                "use layout.stages or layout.replicas"
            )
        self.num_layers = 1 + self.sweeps[-1].layer
        block_costs: defaultdict[int, float] = defaultdict(float)
        for sweep in self.sweeps:
            block_costs[sweep.block] += sweep.cost
        self._shares = [sweep.cost / block_costs[sweep.block] for sweep in self.sweeps]
        # Segment i: the blocks without sweeps that come before layer i.
        self._segments: list[list[int]] = [[] for _ in range(self.num_layers + 1)]
        for block in range(costs.num_blocks):
            if block not in block_costs:
                num_before = 1 + max((sweep.layer for sweep in self.sweeps if sweep.block < block), default=-1)
                self._segments[num_before].append(block)
        self.sweep: Callable[[int, int, int], ChunkCost] = cache(self._sweep)  # a cache per instance, unlike @cache
        self.segment: Callable[[int, int, int], ChunkCost] = cache(self._segment)

    def grid(self, num_spans: int, spans_per_micro_batch: Sequence[int]) -> SpanGrid:
        """Return what the engine makes its schedules from."""
        shapes = tuple(
            SweepShape(sweep.layer, sweep.is_reverse, sweep.cost, sweep.passes_state) for sweep in self.sweeps
        )
        return SpanGrid(shapes, num_spans, tuple(spans_per_micro_batch), has_row_loss=self.costs.profile.row_loss)

    def segments(self, actions: Sequence[Action]) -> dict[Action, list[int]]:
        """Return the segments that a span runs in each of its actions, which are in order; in a backward, backwards."""
        layer_sizes = Counter(sweep.layer for sweep in self.sweeps)
        num_done: Counter[tuple[ActionKind, int, int]] = Counter()  # sweeps of a layer, by kind and micro-batch
        segments: dict[Action, list[int]] = {}
        for action in actions:
            if action.kind is ActionKind.HEAD:
                continue
            layer, is_forward = self.sweeps[action.chunk].layer, action.kind is ActionKind.FORWARD
            done = action.kind, action.micro_batch, layer
            before = [0] if is_forward and layer == 0 and not num_done[done] else []
            num_done[done] += 1
            is_complete = num_done[done] == layer_sizes[layer]
            segments[action] = before + ([layer + 1 if is_forward else layer] if is_complete else [])
        return segments

    def accumulate_seconds(self, action: Action, segments: Sequence[int]) -> float:
        """Return the extra seconds of a backward that adds to existing gradients."""
        block = self.sweeps[action.chunk].block
        own = self._shares[action.chunk] * self.costs.accumulate_seconds(block, block + 1)
        others = (other for segment in segments for other in self._segments[segment])
        return own + sum(self.costs.accumulate_seconds(other, other + 1) for other in others)

    def input_bytes(self, action: Action, segments: Sequence[int]) -> float:
        """Return the bytes per row and time step that recomputation keeps for an action: its inputs and outputs."""
        block = self.sweeps[action.chunk].block
        kept = self._shares[action.chunk] * self.costs.sent_bytes(block + 1)
        return kept + sum(self.costs.sent_bytes(other + 1) for segment in segments for other in self._segments[segment])

    def _sweep(self, number: int, rows: int, steps: int) -> ChunkCost:
        block = self._block(self.sweeps[number].block, rows, steps)
        share = self._shares[number]
        return ChunkCost(share * block.forward, share * block.backward, share * block.saved)

    def _segment(self, index: int, rows: int, steps: int) -> ChunkCost:
        """Return the cost of a segment; the last one includes the loss, unless that is one over whole rows."""
        parts = [self._block(block, rows, steps) for block in self._segments[index]]
        if index == self.num_layers and not self.costs.profile.row_loss:
            parts.append(self.costs.loss_cost(rows, steps))
        return ChunkCost(
            sum(part.forward for part in parts), sum(part.backward for part in parts), sum(part.saved for part in parts)
        )

    def _block(self, index: int, rows: int, steps: int) -> ChunkCost:
        """Return the cost of one block by itself, without the loss."""
        block = self.costs.chunk_cost(index, index + 1, rows, steps)
        if index < self.costs.num_blocks - 1:
            return block
        loss = self.costs.loss_cost(rows, steps)
        return ChunkCost(block.forward - loss.forward, block.backward - loss.backward, block.saved - loss.saved)
