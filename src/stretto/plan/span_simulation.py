"""SpanSimulation: a training step of one replica whose ranks each have a part of the time, as the engine runs it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from stretto.config.layout import Layout
from stretto.plan.actions import Action, ActionKind
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.micro_batches import MicroBatchShape
from stretto.plan.profile import Link
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
            last_backward = span_costs.segment(span_costs.num_layers, *shape).backward
            if action.kind is ActionKind.HEAD:
                work = self._row_loss_seconds(action) + last_backward
                return max(work + profile.action_overhead, profile.host_seconds)
            own_segments = segments[span][action]
            parts = [span_costs.segment(index, *shape) for index in own_segments]
            parts.append(span_costs.sweep(action.chunk, *shape))
            forward = sum(part.forward for part in parts)
            if action.kind is ActionKind.FORWARD:
                has_loss = span_costs.num_layers in own_segments and not profile.row_loss
                forward += last_backward if has_loss else 0.0
                return max(forward + profile.action_overhead, profile.host_seconds)
            work = sum(part.backward for part in parts) + (forward if self.layout.recompute else 0.0)
            # The first micro-batch has no gradient to add to.
            work += span_costs.accumulate_seconds(action, own_segments) if action.micro_batch else 0.0
            return max(work + profile.action_overhead, profile.host_seconds)

        return seconds

    def _row_loss_seconds(self, action: Action) -> float:
        """Return the seconds of a loss over whole rows: the spans gather outputs, and each has some of the rows."""
        shape = self.micro_batches[action.micro_batch]
        num_rows, num_steps = shape.stop - shape.start, shape.chunk_bounds[-1][1]
        loss = self.costs.loss_cost(-(-num_rows // self.layout.spans), num_steps)
        num_bytes = self.costs.sent_bytes(self.costs.num_blocks) * num_rows * num_steps
        links = [self._link_after(span) for span in range(self.layout.spans - 1)]
        # Outputs are gathered before, and their gradients after it.
        return loss.forward + loss.backward + 2 * max(link.seconds(num_bytes) for link in links)

    def message_cost(self) -> ActionCost:
        """Return a function that gives how many seconds the message that is sent after an action takes."""
        links = [self._link_after(span) for span in range(self.layout.spans - 1)]

        def seconds(span: int, action: Action) -> float:
            receiver = self.grid.receiver(action, span)
            if receiver is None:  # of a loss over whole rows, whose own time has it
                return 0.0
            return links[min(span, receiver)].seconds(self._message_bytes(span, receiver, action))

        return seconds

    def _link_after(self, span: int) -> Link:
        """Return the link between a span and the next one."""
        return self.costs.inter_node if self.cluster.crosses_nodes(self.layout, span) else self.costs.intra_node

    def _message_bytes(self, span: int, receiver: int, action: Action) -> float:
        """Return the bytes of a state, or of its gradient: of the rows that the later of the two spans has."""
        num_rows, _ = self.micro_batches[action.micro_batch].chunk_shape(max(span, receiver))
        return self.span_costs.sweeps[action.chunk].state_bytes * num_rows

    def simulate(self) -> Timeline:
        """Return when each action of each span runs."""
        num_on_node = self.cluster.ranks_on_node(self.layout)
        # Assume that all replicas on a node run the same actions at the same time.
        replicas_on_node = max(1, num_on_node // self.layout.spans)

        def speed(num_busy: int) -> float:
            return self.costs.contention.relative_speed(num_on_node, num_busy=num_busy * replicas_on_node)

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
