"""SpanStep: one step of one span, training or evaluation; holds the tensors needed while its actions run.

Each sweep over a span, and each segment between two layers, has an autograd graph of its own:

              x ──►┌───────┐──► y         F: receive `state` from the span before, keep (x, state, y, after),
                   │ sweep │                 send `after` to the next; after a layer's last sweep, run the segment
          state ──►└───────┘──► after        that joins their outputs to the next layer's x, or to the loss

             dx ◄──┌───────┐◄── dy        B: receive d(after) from the next span, send d(state) to the span before;
                   │ sweep │                 after a layer's last sweep, run the segment's backward, from the sum of
       d(state) ◄──└───────┘◄── d(after)     both dx to the dy of the layer before

The backward of the last segment, which has the loss, follows its forward at once. An affine block is an `AffineGraph`.
When messages are sent and received, and gradients handed over to the reducer, is said by `span_order`.
"Next" and "before" are meant in the direction of the sweep. Rows are sorted longest first, so those that a later span
has are the first ones of an earlier span. In the backward direction, a row that ends in a span starts there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from stretto.base.resets import Resets
from stretto.base.state import State, slice_rows
from stretto.base.window import Rows, Window
from stretto.blocks.losses import LossSum
from stretto.blocks.span_program import AffinePart, Sweep, join_sweeps
from stretto.engine.affine_graph import AffineGraph, add_gradients
from stretto.engine.cut import cut_window
from stretto.engine.cut_graph import CutGraph
from stretto.engine.engine import (
    ActionStatus,
    BeforeLastBackward,
    OnOutputs,
    StepResult,
    compute_loss,
    no_op,
    step_result,
    window_tensor,
)
from stretto.engine.gradient_sums import GradientSums
from stretto.engine.precision import autocast
from stretto.engine.span_messages import SpanMessages, StateSpec
from stretto.engine.span_model import SpanModel
from stretto.engine.span_row_loss import SpanRowLoss
from stretto.engine.strided_targets import stride_window
from stretto.plan.actions import Action, ActionKind
from stretto.plan.span_order import CallKind, SpanCall, SpanTurn, span_order
from stretto.plan.span_schedule import SpanGrid, span_schedules

Finish = Callable[[], object]
"""What is left of an action after its message: no other span waits for it."""


@dataclass
class _SpanPart:
    """One micro-batch's part of this span, while its actions run."""

    rows: Rows
    state: State  # of the whole stack, at the window's start
    first: int  # the first time step
    inputs: Tensor  # [time, batch, ...]
    targets: Tensor
    resets: Resets | None
    values: list[Tensor] = field(default_factory=list)  # the next layer's input, and those of open residuals
    sweeps: dict[int, CutGraph] = field(default_factory=dict)  # inputs: x and the state; outputs: y and the state after
    affine: dict[int, AffineGraph] = field(default_factory=dict)  # by the first sweep of the block
    segments: dict[int, CutGraph] = field(default_factory=dict)
    # In the backward: of the values that the last segment made, and of what each sweep made.
    value_gradients: list[Tensor | None] = field(default_factory=list)
    output_gradients: dict[int, Tensor | None] = field(default_factory=dict)

    def lengths(self, stride: int) -> Tensor:
        """Return the rows' numbers of time steps from this span's first on, after blocks of this stride."""
        return self.rows.after_stride(stride).lengths - self.first // stride


class SpanStep:
    """One step of one span; `run` runs its actions in order. `number` is that of the window, for this rank's status."""

    def __init__(
        self,
        model: SpanModel,
        window: Window,
        key: int,
        number: int,
        on_outputs: OnOutputs | None = None,
    ) -> None:
        self.model = model
        self.number = number
        self.program = model.program
        self.span = model.mesh.span
        self.on_outputs = on_outputs
        self.has_backward = torch.is_grad_enabled()
        self.losses: list[LossSum] = []
        row_loss = model.row_loss
        if model.stack.stride > 1 and (row_loss is None or row_loss.targets_per_step):
            window = stride_window(window, model.stack.stride)
        self.cut = cut_window(window, model.layout.micro_batches, model.mesh.num_spans, model.stack.stride)
        if row_loss is not None:
            self.output_spec = model.find_output_spec(window)
        self.window, offset = self._own_time(window)
        self.window = self.cut.sort_window(self.window, model.device, moves_targets=row_loss is None)
        self.rows = self.window.rows(key, model.device, model.stack.dtype)
        self.parts: dict[int, _SpanPart] = {}  # by micro-batch; a short one may end before this span
        specs: list[StateSpec] = []
        for index, shape in enumerate(self.cut.micro_batches):
            rows = self.rows[shape.start : shape.stop]
            # For all micro-batches, also those that end before this span: blocks keep masks from here on.
            state = model.stack.begin(rows)
            specs = specs or [StateSpec.of(sweep.initial_state(rows, state)) for sweep in self.program.sweeps]
            if self.span < len(shape.chunk_bounds):
                self.parts[index] = self._part(index, rows, state, offset)
        self.row_loss: SpanRowLoss | None = None
        if row_loss is not None:
            stride, targets = model.stack.stride, window_tensor(self.window, "targets")
            lengths = self.rows.after_stride(stride).lengths
            self.row_loss = SpanRowLoss(row_loss, model.mesh, self.cut.after_stride(stride), targets, lengths)
        spans = tuple(len(shape.chunk_bounds) for shape in self.cut.micro_batches)
        self.grid = SpanGrid(model.sweep_shapes, model.mesh.num_spans, spans, has_row_loss=row_loss is not None)
        schedules = span_schedules(self.grid, has_backward=self.has_backward)
        rows_per_span = [shape.rows_per_chunk for shape in self.cut.micro_batches]
        self.messages = SpanMessages(model.mesh, self.grid, schedules, specs, rows_per_span)

    def _own_time(self, window: Window) -> tuple[Window, tuple[int, int]]:
        """Return the window with the inputs and targets of this span only, and the time steps that they start at."""
        shapes = [shape for shape in self.cut.micro_batches if self.span < len(shape.chunk_bounds)]
        bounds = [shape.chunk_bounds[self.span] for shape in shapes]
        first, stop = min((first for first, _ in bounds), default=0), max((stop for _, stop in bounds), default=0)
        stride = self.model.stack.stride
        inputs = window_tensor(window, "inputs", self.model.stack.dtype)[first:stop]
        targets = window_tensor(window, "targets")
        if self.model.row_loss is None:  # which needs the targets of whole rows
            targets = targets[first // stride : -(-stop // stride)]
        return replace(window, inputs=inputs, targets=targets), (first, first // stride)

    def _part(self, index: int, rows: Rows, state: State, offset: tuple[int, int]) -> _SpanPart:
        inputs, targets = window_tensor(self.window, "inputs"), window_tensor(self.window, "targets")
        shape = self.cut.micro_batches[index]
        num_rows = shape.rows_per_chunk[self.span]
        columns = slice(shape.start, shape.start + num_rows)
        first, stop = shape.chunk_bounds[self.span]
        target_first, target_stop = shape.after_stride(self.model.stack.stride).chunk_bounds[self.span]
        part_rows = rows[slice(num_rows)]
        ends = None if self.window.resets is None else self.window.resets[first:stop, columns]
        return _SpanPart(
            part_rows,
            slice_rows(state, slice(num_rows)),
            first,
            inputs[first - offset[0] : stop - offset[0], columns],
            targets[target_first - offset[1] : target_stop - offset[1], columns],
            None if ends is None else Resets(replace(part_rows, lengths=part_rows.lengths - first), ends),
        )

    def run(self, before_last_backward: BeforeLastBackward, loss_scale: float) -> StepResult:
        """Run the actions in order; return this span's result of the step."""
        model = self.model
        if self.has_backward:
            self.loss_scale = loss_scale
            self.sums = GradientSums(model.parameters_by_layer, before_last_backward)
        for turn in span_order(self.grid, self.span, has_backward=self.has_backward):
            self._take_turn(turn)
        self.messages.flush()
        model.mesh.world.set_status(f"after window {self.number}")
        return step_result(self.losses, (), model.device)  # no state: every row of the next window starts fresh

    def _take_turn(self, turn: SpanTurn) -> None:
        """Run an action, and make the calls until the next one."""
        self.messages.prepare(turn.posts)
        action = turn.action
        if action is None:
            self._make_calls(turn.later_calls)
            return
        self.model.mesh.world.set_status(ActionStatus(action, self.number))
        received = self.messages.receive(action)
        with self.model.recorder.action(self.span, action):
            if action.kind is ActionKind.FORWARD:
                finish = self._forward(action, received)
            elif action.kind is ActionKind.HEAD:
                finish = self._run_row_loss(action)
            else:
                finish = self._backward(action, received)
            self._make_calls(turn.calls)
            finish()
            self._make_calls(turn.later_calls)

    def _make_calls(self, calls: Sequence[SpanCall]) -> None:
        for kind, number, _ in calls:
            if kind is CallKind.SEND:
                self.messages.send()
            elif kind is CallKind.POST:
                self.messages.post(number)
            else:
                self.sums.hand_over(number)

    def _forward(self, action: Action, received: State | None) -> Finish:
        part, number = self.parts[action.micro_batch], action.chunk
        sweep = self.program.sweeps[number]
        if not part.values:
            self._run_segment(part, 0, [part.inputs])
        if sweep.affine_part is not None:
            return self._forward_affine(action, sweep.affine_part, received)
        lengths = part.lengths(sweep.place.stride)

        def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            with autocast(self.model.device, self.model.precision):
                y, after = sweep(inputs[0], tuple(inputs[1:]), lengths, part.resets)
            return [y, *after]

        state = self._state(sweep, part, received)
        graph = part.sweeps[number] = self._graph(run, [part.values[0], *state])
        self.messages.pack(action, graph.outputs[1:])
        return partial(self._finish_forward, part, sweep.layer)

    def _finish_forward(self, part: _SpanPart, index: int) -> None:
        """Run the segment after a layer, if all its sweeps have run."""
        layer = self.grid.layers[index]
        if all(other in part.sweeps for other in layer):
            outputs = [part.sweeps[other].outputs[0] for other in layer]
            self._run_segment(part, index + 1, [*outputs, *part.values[1:]])
            if not self.has_backward:
                for other in layer:
                    part.sweeps[other].release()
                part.segments.clear()

    def _forward_affine(self, action: Action, affine_part: AffinePart, received: State | None) -> Finish:
        part, sweep = self.parts[action.micro_batch], self.program.sweeps[action.chunk]
        first = action.chunk - affine_part
        if affine_part is AffinePart.RUN:
            context, recompute = partial(autocast, self.model.device, self.model.precision), self.model.layout.recompute
            run = partial(sweep.run_affine, resets=part.resets)
            part.affine[first] = AffineGraph(
                run, part.values[0], context, has_backward=self.has_backward, recompute=recompute
            )
        elif affine_part is AffinePart.PASS:
            self.messages.pack(action, part.affine[first].pass_on(self._state(sweep, part, received)))
        else:
            y = part.affine[first].correct()
            self._run_segment(part, sweep.layer + 1, [y, *part.values[1:]])
            if not self.has_backward:
                del part.affine[first]
                part.segments.clear()
        return no_op

    def _state(self, sweep: Sweep, part: _SpanPart, received: State | None) -> State:
        """Return the state that a sweep starts from."""
        initial = sweep.initial_state(part.rows, part.state)
        return initial if received is None else self._received_state(received, initial)

    def _received_state(self, received: State, initial: State) -> State:
        """Return the state of all rows: that of the rows that another span has, and the initial state of the others."""
        state = []
        for tensor, other in zip(received, initial, strict=True):
            joined = torch.cat([tensor, other[len(tensor) :].detach()]) if len(tensor) < len(other) else tensor
            state.append(joined.requires_grad_(self.has_backward and joined.is_floating_point()))
        return tuple(state)

    def _graph(self, function: Callable[[Sequence[Tensor]], Sequence[Tensor]], inputs: Sequence[Tensor]) -> CutGraph:
        recompute = self.model.layout.recompute
        return CutGraph(function, inputs, has_backward=self.has_backward, recompute=recompute)

    def _run_segment(self, part: _SpanPart, index: int, inputs: list[Tensor]) -> None:
        """Run the segment before layer `index`; after the last layer, the loss too."""
        num_outputs = len(self.grid.layers[index - 1]) if index else 1  # of the sweeps before it

        def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            values = [join_sweeps(inputs[:num_outputs]), *inputs[num_outputs:]]
            with autocast(self.model.device, self.model.precision):
                return self.program.segments[index](values, part.state, part.first)

        if index < self.program.num_layers or self.row_loss is not None:
            part.segments[index] = self._graph(run, inputs)
            part.values = part.segments[index].outputs
            return
        losses: list[LossSum] = []

        def run_with_loss(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            (y,) = run(inputs)
            losses.append(compute_loss(self.model.loss, y, part.targets, self.on_outputs))
            return [losses[-1].total]

        graph = part.segments[index] = CutGraph(run_with_loss, inputs, has_backward=self.has_backward)
        self.losses.append(replace(losses[0], total=losses[0].total.detach()))
        if self.has_backward:
            part.value_gradients = [torch.full_like(graph.outputs[0], self.loss_scale)]
            self._run_segment_backward(part, index)

    def _run_row_loss(self, action: Action) -> Finish:
        """Compute the loss of some rows of a micro-batch; keep the gradient of this span's outputs."""
        assert self.row_loss is not None and self.model.row_loss is not None
        part = self.parts.get(action.micro_batch)
        loss_scale = self.loss_scale if self.has_backward else None
        result = self.row_loss.run(
            action.micro_batch,
            None if part is None else part.values[0],
            self.output_spec,
            on_outputs=self.on_outputs,
            loss_scale=loss_scale,
        )
        self.losses += [] if result.loss is None else [result.loss]
        if self.has_backward:
            self.sums.add([*self.model.row_loss.parameters()], result.weight_gradients)
            if part is not None:
                part.value_gradients = [result.output_gradient]
                return partial(self._run_segment_backward, part, self.program.num_layers)
        return no_op

    def _backward(self, action: Action, received: State | None) -> Finish:
        part, number = self.parts[action.micro_batch], action.chunk
        sweep = self.program.sweeps[number]
        if sweep.affine_part is not None:
            return self._backward_affine(action, sweep.affine_part, received)
        graph = part.sweeps.pop(number)
        output_gradients = [part.output_gradients.pop(number), *_spread_gradients(graph.outputs[1:], received)]
        input_gradients, gradients = graph.backward(output_gradients, sweep.parameters)
        self.messages.pack(action, _state_gradients(graph.inputs[1:], input_gradients[1:]))
        return partial(self._finish_backward, part, sweep, input_gradients[0], gradients)

    def _finish_backward(
        self, part: _SpanPart, sweep: Sweep, input_gradient: Tensor | None, gradients: Sequence[Tensor | None]
    ) -> None:
        """Add the gradients of a sweep; run the backward of the segment before its layer, if it was the last sweep."""
        part.value_gradients[0] = add_gradients(part.value_gradients[0], input_gradient)
        self.sums.add(sweep.parameters, gradients)
        if not any(other in part.sweeps for other in self.grid.layers[sweep.layer]):
            self._run_segment_backward(part, sweep.layer)

    def _backward_affine(self, action: Action, affine_part: AffinePart, received: State | None) -> Finish:
        part, sweep = self.parts[action.micro_batch], self.program.sweeps[action.chunk]
        first = action.chunk - affine_part
        graph = part.affine[first]
        if affine_part is AffinePart.CORRECT:
            graph.begin_backward(part.output_gradients.pop(action.chunk))
        elif affine_part is AffinePart.PASS:
            state_gradients = graph.pass_back(_spread_gradients(graph.after, received))
            self.messages.pack(action, _state_gradients(graph.state, state_gradients))
        else:
            part.value_gradients[0], gradients = graph.backward(sweep.parameters)
            del part.affine[first]
            self.sums.add(sweep.parameters, gradients)
            self._run_segment_backward(part, sweep.layer)
        return no_op

    def _run_segment_backward(self, part: _SpanPart, index: int) -> None:
        """Turn the gradients of a segment's values into those of the sweeps before it and of open residuals."""
        parameters = self.model.segment_parameters(index)
        graph = part.segments.pop(index)
        input_gradients, gradients = graph.backward(part.value_gradients, parameters)
        self.sums.add(parameters, gradients)
        if index:
            layer = self.grid.layers[index - 1]
            part.output_gradients |= zip(layer, input_gradients[: len(layer)], strict=True)
            part.value_gradients = [None, *input_gradients[len(layer) :]]


def _spread_gradients(outputs: Sequence[Tensor], received: State | None) -> list[Tensor | None]:
    """Return the gradient of each tensor of a state: received for those that are floats, zeros for rows that ended."""
    if received is None:
        return [None] * len(outputs)
    gradients = iter(received)
    spread: list[Tensor | None] = []
    for output in outputs:
        if not output.is_floating_point():
            spread.append(None)
            continue
        gradient = next(gradients)
        num_ended = len(output) - len(gradient)
        spread.append(
            torch.cat([gradient, gradient.new_zeros(num_ended, *gradient.shape[1:])]) if num_ended else gradient
        )
    return spread


def _state_gradients(state: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the gradients to send: of the tensors that are floats, zeros if one has none."""
    pairs = [
        (tensor, gradient) for tensor, gradient in zip(state, gradients, strict=True) if tensor.is_floating_point()
    ]
    return [torch.zeros_like(tensor) if gradient is None else gradient for tensor, gradient in pairs]
