"""SpanCosts: what each action of a span runs of a model, and what it costs.

A sweep passes its state from span to span; a segment is what runs between two layers of sweeps, on one span alone. The
engine runs a segment in the same action as the sweep that it waits for:

    forward    F0 = segment 0, sweep 0   F1 = sweep 1, segment 1   F2 = sweep 2   F3 = sweep 3, segment 2 with the loss
    backward   B3 = sweep 3              B2 = sweep 2, segment 1   B1 = sweep 1   B0 = sweep 0, segment 0

The backward of the last segment follows the loss at once: in F3, or in H, the action of a loss over whole rows.

An affine block has three sweeps but one graph: it exists from the run's forward to the run's backward, where the
weights get their gradients, too. With recomputation, the backward of the correction makes the graph again.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import cache

from stretto.base.errors import PlanError
from stretto.config.layout import Layout
from stretto.plan.actions import Action, ActionKind
from stretto.plan.cost_model import ChunkCost, CostModel
from stretto.plan.profile import SweepCosts
from stretto.plan.span_schedule import SpanGrid, SweepShape

# Seconds of an affine block on a span, relative to the same time steps without a state from another span: a constant,
# 1 / (1 - correction_cost) of `python benchmarks/affine_spans.py --quick`: 0.123 on 17 November 2026 (4 MinGRU layers,
# two spans on 2 CPU cores).
AFFINE_OVERHEAD = 1.14


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
        # The first sweep of each affine block, its run, and the last one, its correction.
        self.affine_runs = frozenset(find_affine_runs(self.sweeps))
        self.affine_corrections = frozenset(run + 2 for run in self.affine_runs)
        self._affine_sweeps = {run + part for run in self.affine_runs for part in range(3)}
        # What belongs to a graph, such as the activations and the weights' gradients, belongs to the run.
        self._graph_shares = list(self._shares)
        for run in self.affine_runs:
            self._graph_shares[run : run + 3] = [0.0] * 3
            self._graph_shares[run] = sum(self._shares[run : run + 3])
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

    def recomputed_seconds(self, number: int, rows: int, steps: int) -> float:
        """Return the seconds of what the backward of a sweep runs again if activations are recomputed."""
        if number not in self._affine_sweeps:
            return self.sweep(number, rows, steps).forward
        if number not in self.affine_corrections:
            return 0.0
        return sum(self.sweep(other, rows, steps).forward for other in range(number - 2, number + 1))

    def accumulate_seconds(self, segments: Sequence[int], sweep: int | None = None) -> float:
        """Return the extra seconds of backwards that add to existing gradients."""
        others = (other for segment in segments for other in self._segments[segment])
        seconds = sum(self.costs.accumulate_seconds(other, other + 1) for other in others)
        if sweep is None:
            return seconds
        block = self.sweeps[sweep].block
        return seconds + self._graph_shares[sweep] * self.costs.accumulate_seconds(block, block + 1)

    def sweep_input_bytes(self, number: int) -> float:
        """Return the bytes per row and time step that recomputation keeps for a sweep."""
        return self._graph_shares[number] * self.costs.sent_bytes(self.sweeps[number].block + 1)

    def kept_state_bytes(self, number: int) -> float:
        """Return the bytes per row of the states before and after a sweep; an affine block has those of its run."""
        if number in self.affine_runs:
            return 2.0 * self.sweeps[number + 1].state_bytes
        return 0.0 if number in self._affine_sweeps else 2.0 * self.sweeps[number].state_bytes

    def segment_input_bytes(self, index: int) -> float:
        """Return the bytes per row and time step that recomputation keeps for a segment."""
        return sum(self.costs.sent_bytes(block + 1) for block in self._segments[index])

    def _sweep(self, number: int, rows: int, steps: int) -> ChunkCost:
        block = self._block(self.sweeps[number].block, rows, steps)
        share = self._shares[number] * (AFFINE_OVERHEAD if number in self._affine_sweeps else 1.0)
        return ChunkCost(share * block.forward, share * block.backward, self._graph_shares[number] * block.saved)

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


def find_affine_runs(sweeps: Sequence[SweepCosts]) -> list[int]:
    """Return the first of the three sweeps of each affine block: all spans run it at once, before the state passes."""
    runs: list[int] = []
    for number, sweep in enumerate(sweeps):
        if not sweep.passes_state and (not runs or number > runs[-1] + 2):
            runs.append(number)
    return runs
