"""span_memory: the peak memory of each span, as the order of its actions takes and frees activations.

What a sweep or a segment saves is kept from its forward to its backward. With recomputation only its inputs are, and
what it saves exists while its backward runs. The states before and after a sweep are kept, too. Three parts of a model
are different:

- An affine block has one graph for its three sweeps, from the forward of the run to the backward of the run. With
  recomputation, the run waits without a graph for its correction; the graph is there from the backward of the
  correction to that of the run.
- The backward of the last segment follows the loss at once, so what it saves exists during one action.
- If the loss is one over whole rows, the last segment and its outputs wait for it, from the forward to the head.

A receive has a buffer from the start of the action after which it is posted (`span_order`) to the end of the action
that needs the message; then it is the state of a sweep. Of those that are sent to a neighbor, the last few exist.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from stretto.config.layout import Layout
from stretto.plan.actions import Action, ActionKind
from stretto.plan.cost_model import CostModel
from stretto.plan.memory import NUM_MESSAGE_BUFFERS, RankMemory, num_communicators
from stretto.plan.span_costs import SpanCosts
from stretto.plan.span_order import CallKind, span_order
from stretto.plan.span_schedule import SpanGrid, span_schedules


@dataclass
class _ActionBytes:
    """The bytes that an action takes at its start, frees at its end, and needs only meanwhile."""

    taken: float = 0.0
    freed: float = 0.0
    meanwhile: float = 0.0


def span_memory(costs: CostModel, layout: Layout, rows: int, steps: int) -> list[RankMemory]:
    """Return the memory of each span: all weights, and the activations of its own time, `rows` x `steps`."""
    span_costs, num_blocks = SpanCosts(costs, layout), costs.num_blocks
    weights = costs.weight_bytes(0, num_blocks)
    grid = span_costs.grid(layout.spans, [layout.spans] * layout.micro_batches)
    activations = _SpanActivations(span_costs, layout, rows, steps)
    memory = []
    for span, actions in enumerate(span_schedules(grid)):
        memory.append(
            RankMemory(
                weights=weights,
                casts=costs.cast_bytes(0, num_blocks),
                gradients=weights,
                optimizer=weights * costs.profile.optimizer_state_ratio,
                activations=activations.peak(actions),
                messages=rows * _peak_message_bytes(span_costs, grid, span),
                communicators=num_communicators(layout, span) * costs.profile.communicator_bytes,
            )
        )
    return memory


def _peak_message_bytes(span_costs: SpanCosts, grid: SpanGrid, span: int) -> float:
    """Return the most bytes per row that the messages of a span take at a time, in both directions."""

    def num_bytes(action: Action | None) -> float:
        return 0.0 if action is None else span_costs.sweeps[action.chunk].state_bytes

    received = peak = 0.0
    sent = {neighbor: deque([0.0], maxlen=NUM_MESSAGE_BUFFERS) for neighbor in (span - 1, span + 1)}
    for turn in span_order(grid, span):
        calls = (*turn.calls, *turn.later_calls)
        received += sum(num_bytes(call.action) for call in calls if call.kind is CallKind.POST)
        for call in calls:
            if call.kind is CallKind.SEND:
                sent[call.number].append(num_bytes(call.action))
        peak = max(peak, received + sum(map(sum, sent.values())))
        if turn.action is not None and grid.sender(turn.action, span) is not None:
            received -= num_bytes(turn.action)
    return peak


class _SpanActivations:
    """The activations that a span holds, for micro-batches of `rows` rows and spans of `steps` time steps."""

    def __init__(self, span_costs: SpanCosts, layout: Layout, rows: int, steps: int) -> None:
        self.span_costs = span_costs
        self.layout = layout
        self.shape = rows, steps
        self.last = span_costs.num_layers  # the index of the last segment
        self.has_row_loss = span_costs.costs.profile.row_loss
        self.output_bytes = span_costs.costs.sent_bytes(span_costs.costs.num_blocks) * rows * steps

    def peak(self, actions: Sequence[Action]) -> float:
        """Return the most bytes that are held at a time, if a span runs these actions in order."""
        segments = self.span_costs.segments(actions)
        held = peak = 0.0
        for action in actions:
            if action.kind is ActionKind.HEAD:
                change = self._head()
            elif action.kind is ActionKind.FORWARD:
                change = self._forward(action.chunk, segments[action])
            else:
                change = self._backward(action.chunk, segments[action])
            held += change.taken
            peak = max(peak, held + change.meanwhile)
            held -= change.freed
        return peak

    def _forward(self, sweep: int, segments: Sequence[int]) -> _ActionBytes:
        change = _ActionBytes(self._kept_sweep(sweep) + sum(self._kept_segment(index) for index in segments))
        if self.last in segments and not self.has_row_loss:
            change.meanwhile = self._saved_segment(self.last)
        if self.layout.recompute and sweep in self.span_costs.affine_runs:
            change.taken += self._saved_sweep(sweep)  # without a graph, it is at most as much
        elif self.layout.recompute and sweep in self.span_costs.affine_corrections:
            change.freed = self._saved_sweep(sweep - 2)
        return change

    def _backward(self, sweep: int, segments: Sequence[int]) -> _ActionBytes:
        change = _ActionBytes(freed=self._kept_sweep(sweep) + sum(self._kept_segment(index) for index in segments))
        if not self.layout.recompute:
            return change
        change.meanwhile = sum(self._saved_segment(index) for index in segments)
        if sweep in self.span_costs.affine_corrections:
            change.taken = self._saved_sweep(sweep - 2)
        elif sweep in self.span_costs.affine_runs:
            change.freed += self._saved_sweep(sweep)
        else:
            change.meanwhile += self._saved_sweep(sweep)
        return change

    def _head(self) -> _ActionBytes:
        """Return the bytes of a loss over whole rows: a span has all time steps of some rows."""
        rows, steps = self.shape
        loss = self.span_costs.costs.loss_cost(-(-rows // self.layout.spans), steps * self.layout.spans)
        # After the loss, the gradients of all rows are gathered, beside the outputs, their gradient and a copy of it.
        meanwhile = max(2 * self.output_bytes + loss.saved, (self.layout.spans + 3) * self.output_bytes)
        if self.layout.recompute:
            meanwhile = max(meanwhile, self._saved_segment(self.last))
        return _ActionBytes(freed=self._kept_segment(self.last), meanwhile=meanwhile)

    def _kept_sweep(self, number: int) -> float:
        """Return the bytes that are kept from the forward of a sweep to its backward."""
        states = self.span_costs.kept_state_bytes(number) * self.shape[0]
        if not self.layout.recompute:
            return self._saved_sweep(number) + states
        return self.span_costs.sweep_input_bytes(number) * self.shape[0] * self.shape[1] + states

    def _kept_segment(self, index: int) -> float:
        """Return the bytes that are kept from the forward of a segment to its backward in another action."""
        if index == self.last and not self.has_row_loss:
            return 0.0
        if self.layout.recompute:
            return self.span_costs.segment_input_bytes(index) * self.shape[0] * self.shape[1]
        return self._saved_segment(index) + (self.output_bytes if index == self.last else 0.0)

    def _saved_sweep(self, number: int) -> float:
        return self.span_costs.sweep(number, *self.shape).saved

    def _saved_segment(self, index: int) -> float:
        return self.span_costs.segment(index, *self.shape).saved
