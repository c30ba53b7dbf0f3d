"""SpanSimulation: a training step of one replica whose ranks each have a part of the time, as the engine runs it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from stretto.config.layout import Layout
from stretto.plan.actions import Action, ActionKind
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.micro_batches import MicroBatchShape
from stretto.plan.placement import link_after, shared_speed
from stretto.plan.simulator import ActionCost, simulate
from stretto.plan.span_costs import SpanCosts
from stretto.plan.span_schedule import SpanGrid, span_schedules
from stretto.plan.timeline import Timeline


@dataclass(frozen=True)
class SpanSimulation:
    """One training step of one replica; chunk i of each micro-batch is the part of span i."""

    costs: CostModel
    layout: Layout
    cluster: Cluster
    micro_batches: Sequence[MicroBatchShape]

    def held_blocks(self, span: int) -> Sequence[slice]:
        """Return the ranges of blocks that a span holds: all."""
        return [slice(0, self.costs.num_blocks)]

    @cached_property
    def span_costs(self) -> SpanCosts:
        return SpanCosts(self.costs, self.layout)

    @cached_property
    def grid(self) -> SpanGrid:
        return self.span_costs.grid(self.layout.spans, [len(shape.chunk_bounds) for shape in self.micro_batches])

    def action_cost(self) -> ActionCost:
        """Return a function that gives how many seconds an action takes on a span whose rank computes alone."""
        span_costs, profile = self.span_costs, self.costs.profile
        segments = [span_costs.segments(actions) for actions in span_schedules(self.grid)]

        def seconds(span: int, action: Action) -> float:
            shape = self.micro_batches[action.micro_batch].chunk_shape(span)
            if action.kind is ActionKind.HEAD:
                work = self._row_loss_seconds(action) + self._last_backward(span, action)
                return max(work + profile.action_overhead, profile.host_seconds)
            own_segments = segments[span][action]
            sweep = span_costs.sweep(action.chunk, *shape)
            parts = [span_costs.segment(index, *shape) for index in own_segments]
            forward = sum(part.forward for part in parts)
            if action.kind is ActionKind.FORWARD:
                has_loss = span_costs.num_layers in own_segments and not profile.row_loss
                work = sweep.forward + forward + (self._last_backward(span, action) if has_loss else 0.0)
                return max(work + profile.action_overhead, profile.host_seconds)
            work = sweep.backward + sum(part.backward for part in parts)
            if self.layout.recompute:
                work += forward + span_costs.recomputed_seconds(action.chunk, *shape)
            # The first micro-batch has no gradient to add to.
            work += span_costs.accumulate_seconds(own_segments, action.chunk) if action.micro_batch else 0.0
            return max(work + profile.action_overhead, profile.host_seconds)

        return seconds

    def _last_backward(self, span: int, action: Action) -> float:
        """Return the seconds of the last segment's backward, which follows the loss in the same action."""
        index, shape = self.span_costs.num_layers, self.micro_batches[action.micro_batch].chunk_shape(span)
        if not shape[0]:  # the micro-batch ends before this span
            return 0.0
        segment = self.span_costs.segment(index, *shape)
        # Only between its forward and a loss over whole rows is its graph not kept.
        is_recomputed = self.layout.recompute and self.costs.profile.row_loss
        accumulate = self.span_costs.accumulate_seconds([index]) if action.micro_batch else 0.0
        return segment.backward + accumulate + (segment.forward if is_recomputed else 0.0)

    def _row_loss_seconds(self, action: Action) -> float:
        """Return the seconds of a loss over whole rows: the spans gather outputs, and each has some of the rows."""
        shape = self.micro_batches[action.micro_batch]
        num_rows, num_steps = shape.stop - shape.start, shape.chunk_bounds[-1][1]
        loss = self.costs.loss_cost(-(-num_rows // self.layout.spans), num_steps)
        num_bytes = self.costs.sent_bytes(self.costs.num_blocks) * num_rows * num_steps
        links = [link_after(self.costs, self.cluster, self.layout, span) for span in range(self.layout.spans - 1)]
        # Outputs are gathered before, and their gradients after it.
        return loss.forward + loss.backward + 2 * max(link.seconds(num_bytes) for link in links)

    def message_cost(self) -> ActionCost:
        """Return a function that gives how many seconds the message that is sent after an action takes."""
        links = [link_after(self.costs, self.cluster, self.layout, span) for span in range(self.layout.spans - 1)]

        def seconds(span: int, action: Action) -> float:
            receiver = self.grid.receiver(action, span)
            if receiver is None:  # of a loss over whole rows, whose own time has it
                return 0.0
            return links[min(span, receiver)].seconds(self._message_bytes(span, receiver, action))

        return seconds

    def _message_bytes(self, span: int, receiver: int, action: Action) -> float:
        """Return the bytes of a state, or of its gradient: of the rows that the later of the two spans has."""
        num_rows, _ = self.micro_batches[action.micro_batch].chunk_shape(max(span, receiver))
        return self.span_costs.sweeps[action.chunk].state_bytes * num_rows

    def simulate(self) -> Timeline:
        """Return when each action of each span runs."""
        speed = shared_speed(self.costs, self.cluster, self.layout)
        schedules = span_schedules(self.grid)
        return simulate(schedules, self.action_cost(), self.message_cost(), speed=speed, neighbors=self.grid)

    def tied_seconds(self) -> float:
        """Return 0: each span has all blocks, so no copies of tied weights have to be summed."""
        return 0.0

    def traffic(self, span: int) -> float:
        """Return the bytes that a rank of a span sends: states and their gradients, and its weights' gradients."""
        copies = self.layout.replicas * self.layout.spans
        total = 2 * (copies - 1) / copies * self.costs.weight_bytes(0, self.costs.num_blocks)  # in a ring
        for action in span_schedules(self.grid)[span]:
            receiver = self.grid.receiver(action, span)
            total += 0.0 if receiver is None else self._message_bytes(span, receiver, action)
        if self.costs.profile.row_loss:
            num_tokens = sum(rows * steps for shape in self.micro_batches for rows, steps in [shape.chunk_shape(span)])
            total += 2 * (self.layout.spans - 1) * self.costs.sent_bytes(self.costs.num_blocks) * num_tokens
        return total
