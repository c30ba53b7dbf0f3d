"""PipelineEngine: runs one stage's part of a training step, split into micro-batches (rows) and chunks (time).

An action is the forward (F) or backward (B) of one chunk. The engine runs its stage's actions in the order in which
`stretto.plan` simulates and draws them. Each chunk has its own autograd graph:

                x ──►┌────────┐──► y        F: keep (x, state, y, after), send y to the next stage,
                     │ blocks │                start the next chunk from `after`, detached
            state ──►└────────┘──► after

               dx ◄──┌────────┐◄── dy       B: receive dy from the next stage; d(after) comes from the backward of
                     │ blocks │                the next chunk; send dx to the previous stage,
         d(state) ◄──└────────┘◄── d(after)    keep d(state) for the backward of the previous chunk

Detaching at a chunk's end cuts the graph, and feeding d(state) in by hand joins it again: this is exact backpropagation
through the whole window. Worked example with 2 stages and 3 chunks, on stage 0 (a graph lives from its F to its B):

    F0           after0 ─detach─► state1                                 live: 0
    F1           after1 ─detach─► state2                                 live: 0 1
    F2           after2 is the state for the next window                 live: 0 1 2
    B2           root y2 with dy2 from stage 1    ─► d(state2)           live: 0 1
    B1           roots y1 (dy1), after1 (d(state2)) ─► d(state1)         live: 0
    B0           roots y0 (dy0), after0 (d(state1))                      all gradients are complete

A stage may have several runs of blocks (`RunChain`), each with its own states. An action belongs to one of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from stretto.base.denormals import flush_denormals
from stretto.base.resets import Resets
from stretto.base.state import State, cat_rows, detach, slice_rows
from stretto.base.window import Window
from stretto.blocks.cast_weights import CastWeights
from stretto.blocks.check_widths import ModelInput
from stretto.blocks.losses import Loss, LossSum
from stretto.blocks.row_loss import RowLoss
from stretto.blocks.row_summary import find_unsummarized
from stretto.blocks.stack import Stack
from stretto.blocks.torch_losses import as_loss
from stretto.config.layout import Layout
from stretto.engine.boundary import Boundary, infer_boundary
from stretto.engine.cut import WindowCut, cut_window
from stretto.engine.edge import Edge
from stretto.engine.embedding_step import EmbeddingStep
from stretto.engine.engine import (
    ActionStatus,
    BeforeLastBackward,
    OnOutputs,
    StepResult,
    compute_loss,
    describe_engine,
    no_op,
    reset_ended_rows,
    squared_grad_norm,
    step_result,
    window_tensor,
)
from stretto.engine.precision import Precision, autocast, check_precision, compute_dtype
from stretto.engine.recorder import ActionRecorder
from stretto.engine.reset_check import check_resets
from stretto.engine.row_loss_step import RowLossStep
from stretto.engine.stage_run import StageRun
from stretto.engine.strided_targets import stride_window
from stretto.engine.tied_weights import TiedWeights
from stretto.engine.vocab_head import HeadStep, VocabHead
from stretto.mesh.channel import Channel
from stretto.mesh.mesh import Mesh
from stretto.plan.actions import Action, ActionKind
from stretto.plan.run_chain import RunChain
from stretto.plan.schedule import chain_schedule, following_actions, forward_schedule


@dataclass
class _LiveChunk:
    """A chunk between its forward and its backward."""

    x: Tensor  # a new autograd leaf that collects dx; on the first stage, the window's inputs
    state: State  # new autograd leaves that collect d(state); in the first chunk, the initial or carried state
    y: Tensor | None = None  # the output, or the summed loss of a chunk; None if it will be recomputed
    after: State = ()  # the state after the chunk, with its graph


@dataclass
class _MicroBatchProgress:
    """What one micro-batch carries from chunk to chunk in one run of blocks, forward and backward in time."""

    state: State  # the next forward starts from it
    ended_states: list[State] = field(default_factory=list)  # final states of the dropped rows, in order of time
    after_gradients: list[Tensor | None] | None = None  # d(after) for the next backward; None before the first


class PipelineEngine:
    """Runs one stage of a model; the neighboring stages run on other ranks.

    `stack` is this rank's stage, and `runs` its runs of blocks: by default one, which must be causal if `layout.chunks`
    is more than one. `model` is the whole model, by default this stage: what the engine says of it is the same on every
    rank. The engine does not keep it.
    """

    def __init__(
        self,
        stack: Stack,
        loss: Loss,
        layout: Layout,
        mesh: Mesh,
        *,
        precision: Precision = "fp32",
        model: Stack | None = None,
        runs: Sequence[StageRun] | None = None,
    ) -> None:
        self.stack = stack
        model = stack if model is None else model
        self.runs = runs or [StageRun(stack, mesh.stage, chain=RunChain.of(mesh.num_stages), model=model)]
        self.chain = self.runs[0].chain
        self.is_causal = model.causal
        self.stride = model.stride
        self.unsummarized = find_unsummarized(model)
        self.model_input = ModelInput.of(model)
        self.mesh = mesh
        self.layout = layout
        self.num_micro_batches = layout.micro_batches
        self.device = mesh.world.device
        self.recorder = ActionRecorder(self.device)
        self.num_started_windows = 0  # shown in this rank's status
        self._loss = as_loss(loss)
        self.row_loss = self._loss if isinstance(self._loss, RowLoss) else None
        self.strides_targets = self.stride > 1 and (self.row_loss is None or self.row_loss.targets_per_step)
        self.has_whole_rows = self.row_loss is not None or layout.chunks == 1 or self.chain.whole[-1]
        self.precision = check_precision(precision, model)
        rnns = [rnn for run in self.runs for rnn in run.fused_stack.rnns]
        self.cast_weights = CastWeights(rnns, compute_dtype(precision))
        self.tied_weights = TiedWeights(stack, {})
        self.first_block = model.first  # the index of the whole model's first block
        self.vocab_head: VocabHead | None = None  # if all stages share the last block's work
        self._boundaries: list[Boundary] | None = None

    def __repr__(self) -> str:
        return describe_engine(self)

    @flush_denormals()
    def step(
        self,
        window: Window,
        carried: State | None,
        key: int,
        before_last_backward: BeforeLastBackward = no_op,
        loss_scale: float = 1.0,
    ) -> StepResult:
        """Run this stage's actions; leave the gradient of the summed loss in the parameters' `.grad`."""
        self.stack.train()
        self.stack.zero_grad(set_to_none=True)
        cut = self._cut(window)
        actions = chain_schedule(self.chain, self.mesh.stage, len(cut.micro_batches), cut.num_chunks)
        with self.cast_weights.for_step():
            step = _PipelineStep(self, window, cut, carried, key, before_last_backward, loss_scale)
            if step.head is not None:
                step.head.loss_scale = loss_scale
            result = step.run(actions)
        # The last backward has already summed the gradients over the replicas, if there are several.
        self.tied_weights.sum_gradients()
        return result

    @torch.no_grad()
    def eval_step(
        self, window: Window, carried: State | None, key: int, on_outputs: OnOutputs | None = None
    ) -> StepResult:
        """Run the forwards only, without dropout and without gradients."""
        self.stack.eval()
        cut = self._cut(window)
        actions = forward_schedule(self.chain, self.mesh.stage, len(cut.micro_batches), cut.num_chunks)
        with self.cast_weights.for_step():
            step = _PipelineStep(self, window, cut, carried, key, no_op, loss_scale=1.0)
            step.on_outputs = on_outputs
            if step.head is not None:
                step.head.on_outputs = on_outputs
            return step.run(actions)

    @property
    def reads_targets(self) -> bool:
        """Whether this stage needs a window's targets."""
        return self.uses_targets or self.strides_targets

    @property
    def uses_targets(self) -> bool:
        """Whether this stage computes a part of the loss."""
        return self.mesh.is_last_stage or self.vocab_head is not None

    @property
    def reads_inputs(self) -> bool:
        """Whether this stage needs a window's inputs."""
        return self.mesh.is_first_stage or (self.vocab_head is not None and self.vocab_head.embedding is not None)

    def squared_grad_norm(self) -> Tensor:
        """Return the squared norm of the gradients of this stage, without weights that an earlier stage holds too."""
        return squared_grad_norm(self.stack, self.device)

    def _cut(self, window: Window) -> WindowCut:
        return cut_window(window, self.layout.micro_batches, self.layout.chunks, self.stride)

    def boundaries(self, inputs: Tensor | None) -> list[Boundary]:
        """Return the specs of the input and output of each run. The first call is collective over the stages."""
        if self._boundaries is None:
            self._boundaries = []
            with autocast(self.device, self.precision), torch.no_grad():
                for run in self.runs:
                    given = inputs if run.is_first else None if run.receives else self._boundaries[-1][1]
                    self._boundaries.append(
                        infer_boundary(run.stack, self.mesh, given, is_last=run.is_last, sends=run.sends)
                    )
        return self._boundaries

    def run_blocks(
        self,
        run: StageRun,
        x: Tensor,
        state: State,
        targets: Tensor | None,
        resets: Resets | None,
        on_outputs: OnOutputs | None = None,
    ) -> tuple[Tensor | LossSum, State]:
        """Run a run over one chunk; return its output, or the loss if there are targets, and the state after it."""
        with autocast(self.device, self.precision):
            if resets is None:
                y, after = run.fused_stack(x, state)
            else:
                y, after = run.stack.run_with_resets(x, state, resets)
        return (y if targets is None else compute_loss(self._loss, y, targets, on_outputs)), after


class _PipelineStep:
    """One step of one stage, training or evaluation: holds the tensors needed while its actions run."""

    def __init__(
        self,
        engine: PipelineEngine,
        window: Window,
        cut: WindowCut,
        carried: State | None,
        key: int,
        before_last_backward: BeforeLastBackward,
        loss_scale: float,
    ) -> None:
        self.engine = engine
        self.mesh = engine.mesh
        self.runs, self.cuts = engine.runs, [run.cuts(cut) for run in engine.runs]  # cuts of inputs and outputs, by run
        self.edges = self._make_edges(cut)
        self.before_last_backward = before_last_backward
        self.loss_scale = loss_scale
        self.on_outputs: OnOutputs | None = None
        self.loss_gradient: Tensor | None = None  # the gradient that each backward of the last stage starts with
        engine.num_started_windows += 1
        self.has_backward = torch.is_grad_enabled()
        self.recompute = engine.layout.recompute
        self.live_chunks: dict[tuple[int, int, int], _LiveChunk] = {}  # by (run, micro-batch, chunk)
        self.losses: list[LossSum] = []
        check_resets(engine, window)
        if engine.strides_targets:
            # Every stage checks the targets, before the first message: an error of the last one alone would be a hang.
            window = stride_window(window, engine.stride)
        if not engine.uses_targets:
            window = replace(window, targets=None)
        if engine.vocab_head is not None:
            engine.vocab_head.check_window(window)
        # All copies to the device are made here, once, before any message is awaited.
        self.window = cut.sort_window(window, engine.device, moves_targets=engine.row_loss is None)
        self.inputs = window_tensor(self.window, "inputs", engine.stack.dtype) if self.mesh.is_first_stage else None
        targets = window_tensor(self.window, "targets") if engine.uses_targets else None
        self.rows = self.window.rows(key, engine.device, engine.stack.dtype)
        self.embedding = self._split_embedding(cut)
        self.head: HeadStep | None = None
        if engine.vocab_head is not None and targets is not None:
            # All stages share the head, so each sees the outputs of the last block before it.
            self.head = HeadStep(engine.vocab_head, cut.after_stride(engine.stride), targets, self.embedding)
        self.targets = targets if self.head is None else None
        self.row_loss_step: RowLossStep | None = None  # on the last stage, if the loss is over whole rows
        if engine.row_loss is not None and self.targets is not None:
            lengths = self.rows.after_stride(self.runs[-1].output_stride).lengths
            self.row_loss_step = RowLossStep(engine.row_loss, self.cuts[-1][1], self.targets, lengths, loss_scale)
        self.window_cut = cut
        self.progress = self._begin(None if carried is None else cut.sort_state(carried))  # [run][micro-batch]

    def _make_edges(self, cut: WindowCut) -> list[tuple[Edge | None, Edge | None]]:
        """Return the edges before and after each run of this stage; None at the model's ends."""
        forward, backward, edges = self.mesh.forward_channel, self.mesh.backward_channel, []
        before: Edge | None = None
        for run in self.runs:
            if run.receives:
                before = Edge(run.edge_cut(cut), forward, backward)
            after = None
            if not run.is_last:
                is_whole = self.engine.chain.is_edge_whole(run.number + 1)
                edge_cut = (cut.whole() if is_whole else cut).after_stride(run.output_stride)
                after = Edge(edge_cut, forward, backward) if run.sends else Edge(edge_cut)
            edges.append((None if run.is_first else before, after))
            before = after
        return edges

    def _begin(self, carried: State | None) -> list[list[_MicroBatchProgress]]:
        """Return the states that each run's micro-batches start from.

        `begin` is called per micro-batch: a learned initial state then has one graph per micro-batch, which the
        backward of its first chunk frees.
        """
        progress, first = [], 0
        for run in self.runs:
            rows = self.rows.after_stride(run.input_stride)
            own = None if carried is None else carried[first : first + run.num_state_tensors]
            first += run.num_state_tensors
            states = []
            for shape in self.window_cut.micro_batches:
                part = slice(shape.start, shape.stop)
                carried_rows = None if own is None else slice_rows(own, part)
                states.append(_MicroBatchProgress(run.stack.begin(rows[part], carried_rows)))
            progress.append(states)
        return progress

    def _state(self) -> State:
        """Return the state after the window, of the window's rows in their order."""
        states: list[Tensor] = []
        for run, progresses in zip(self.runs, self.progress, strict=True):
            # Rows are sorted longest first, so those that ended last come right after the remaining ones.
            state = cat_rows([cat_rows([progress.state, *reversed(progress.ended_states)]) for progress in progresses])
            rows = self.rows.after_stride(run.input_stride)
            states += reset_ended_rows(run.stack, rows, self.window, state)
        return self.window_cut.unsort_state(tuple(states))

    def _split_embedding(self, cut: WindowCut) -> EmbeddingStep | None:
        """Return the lookups of this step, if the stages split the table of the embedding; else None.

        `cut` is that of the window: tokens come before all strides, on every stage.
        """
        head = self.engine.vocab_head
        if head is None or head.embedding is None:
            return None
        tokens = window_tensor(self.window, "inputs")
        # What the first stage runs on is not the window's inputs but the vectors of these tokens.
        self.inputs = None
        key = self.rows.for_block(self.engine.first_block).key
        return EmbeddingStep(head.embedding, self.mesh, head.group, cut, tokens, key)

    def run(self, actions: list[Action]) -> StepResult:
        """Run the actions in order; return this stage's result of the step."""
        if self.head is not None:
            actions = self.head.schedule()
        # A micro-batch that ends early has fewer chunks than the schedule; every stage skips the same actions.
        actions = [action for action in actions if self.cuts[action.run][0].dims(action) != (0, 0)]
        self._post_receives(actions)
        posted_after = self._receives_after(actions)
        last_backward = next((action for action in reversed(actions) if action.kind is ActionKind.BACKWARD), None)
        for action in actions:
            self.mesh.world.set_status(ActionStatus(action, self.engine.num_started_windows))
            if self.head is not None:
                self.head.post_receives(action)
            if action.kind is ActionKind.FORWARD:
                self._forward(action)
            elif action.kind is ActionKind.BACKWARD:
                self._backward(action, is_last=action is last_backward)
            elif self.head is not None:
                self.head.receive(action)
                with self.engine.recorder.action(self.mesh.stage, action):
                    self.losses += self.head.run(action)
            if (channel := posted_after.get(action)) is not None:
                channel.post_ahead()
        if self.embedding is not None and self.has_backward and (roots := self.before_last_backward()):
            # The table's gradient is complete only now, after the last backward.
            torch.autograd.backward(roots)
        if self.mesh.forward_channel is not None and self.mesh.backward_channel is not None:
            self.mesh.forward_channel.flush()
            self.mesh.backward_channel.flush()
        if self.head is not None:
            self.head.finish()
        self.mesh.world.set_status(f"after window {self.engine.num_started_windows}")
        return step_result(self.losses, self._state(), self.engine.device)

    def _post_receives(self, actions: list[Action]) -> None:
        """Post the first receives. Every rank knows the rows' lengths, so no shapes have to be sent."""
        if self.mesh.forward_channel is None or self.mesh.backward_channel is None:
            return
        boundaries = self.engine.boundaries(self._example_input())
        self.mesh.forward_channel.post_receives(self._buffers(actions, ActionKind.FORWARD, boundaries))
        self.mesh.backward_channel.post_receives(self._buffers(actions, ActionKind.BACKWARD, boundaries))

    def _receives_after(self, actions: list[Action]) -> dict[Action, Channel]:
        """Return, by action, the channel whose next receive to post after it, if chunks pass the stages several times.

        A stage then posts the receive of its next forward right after a forward, also if a backward comes between them,
        and the other way round. The message is on its way, and its sender may wait for the receive: all stages send in
        both directions of the ring. It was sent without any of this stage's later actions.
        """
        if not self.mesh.is_ring:
            return {}
        after: dict[Action, Channel] = {}
        cut, existing = self.window_cut, set(actions)
        following = following_actions(self.engine.chain, self.mesh.stage, len(cut.micro_batches), cut.num_chunks)
        for action in actions:
            is_forward, next_action = action.kind is ActionKind.FORWARD, following.get(action)
            if next_action is not None and next_action in existing:
                run = self.runs[next_action.run]
                channel = self.mesh.forward_channel if is_forward else self.mesh.backward_channel
                if channel is not None and (run.receives if is_forward else run.sends):
                    after[action] = channel
        return after

    def _example_input(self) -> Tensor | None:
        """Return some input of the first stage; None on other stages."""
        if self.embedding is None or not self.mesh.is_first_stage:
            return self.inputs
        return self.embedding.example()

    def _buffers(self, actions: list[Action], kind: ActionKind, boundaries: list[Boundary]) -> Iterator[Tensor]:
        # A generator: a buffer is allocated only when it is the next one.
        side = 0 if kind is ActionKind.FORWARD else 1
        for action in actions:
            edge = self.edges[action.run][side]
            if action.kind is kind and edge is not None:
                spec = boundaries[action.run][side]
                assert spec is not None
                yield from edge.buffers(action, self.runs[action.run], spec)

    def _forward(self, action: Action) -> None:
        run, (_, next_edge) = self.runs[action.run], self.edges[action.run]
        progress = self.progress[action.run][action.micro_batch]
        x = self._input(action)
        with self.engine.recorder.action(self.mesh.stage, action):
            state = self._drop_ended(progress, action) if action.chunk > 0 else progress.state
            live = _LiveChunk(
                self._leaf(x, needs_grad=not run.is_first or self.embedding is not None),
                # The state of the first chunk keeps its graph: it may lead to a learned initial state.
                tuple(self._leaf(tensor, needs_grad=action.chunk > 0) for tensor in state),
            )
            with torch.set_grad_enabled(self.has_backward and not self.recompute):
                y, after = self.engine.run_blocks(
                    run, live.x, live.state, self._targets(action), self._resets(action), self.on_outputs
                )
            progress.state = detach(after)
            if isinstance(y, LossSum):
                self.losses.append(replace(y, total=y.total.detach()))
                y = y.total
            elif self.row_loss_step is not None and run.is_last:
                self.row_loss_step.add(action, y)
                loss = self.row_loss_step.loss(action, self.on_outputs, has_backward=self.has_backward)
                self.losses += [] if loss is None else [loss]
            elif self.head is not None and run.is_last:
                self.head.keep_output(action, y)
            elif next_edge is not None:
                next_edge.send(action, y.detach(), run)
            if self.has_backward:
                if not self.recompute:
                    live.y, live.after = y, after
                self.live_chunks[action.run, action.micro_batch, action.chunk] = live

    def _backward(self, action: Action, is_last: bool) -> None:
        run, (edge, next_edge) = self.runs[action.run], self.edges[action.run]
        progress = self.progress[action.run][action.micro_batch]
        live = self.live_chunks.pop((action.run, action.micro_batch, action.chunk))
        y_gradient = None
        if next_edge is not None:
            y_gradient = next_edge.receive(action, run, f"the gradient of {action}")
        elif self.head is not None:
            y_gradient = self.head.take_gradient(action)
        with self.engine.recorder.action(self.mesh.stage, action):
            if live.y is None:
                # layout.recompute: the forward ran without a graph, so it runs again with one.
                y, live.after = self.engine.run_blocks(
                    run, live.x, live.state, self._targets(action), self._resets(action)
                )
                live.y = y.total if isinstance(y, LossSum) else y
            if self.row_loss_step is not None and run.is_last:
                y_gradient = self.row_loss_step.gradient(action)
            elif y_gradient is None:
                if self.loss_gradient is None:
                    self.loss_gradient = torch.full_like(live.y, self.loss_scale)
                y_gradient = self.loss_gradient
            roots, gradients = self._roots(live, y_gradient.to(live.y.dtype), progress.after_gradients)
            if is_last:
                roots += [] if self.embedding is not None else self.before_last_backward()
                roots += self.engine.cast_weights.roots_of_last_backward()
                gradients += [None] * (len(roots) - len(gradients))
            # In a ring, the receiver may be sending a gradient to this stage, and take this one only afterwards. So no
            # kernel of this backward may come after the message.
            sends_early = edge is not None and live.x.requires_grad and (is_last or not self.mesh.is_ring)
            if edge is not None and sends_early:
                # Sent as soon as it exists: the last backward ends only when DDP has reduced the gradients.
                live.x.register_post_accumulate_grad_hook(lambda x: edge.send(action, x.grad, run))  # type: ignore[no-untyped-call]
            if roots:
                torch.autograd.backward(roots, gradients)
            if edge is not None and not (sends_early and live.x.grad is not None):
                edge.send(action, torch.zeros_like(live.x) if live.x.grad is None else live.x.grad, run)
            if self.embedding is not None and run.is_first:
                self.embedding.keep_gradient(action, torch.zeros_like(live.x) if live.x.grad is None else live.x.grad)
            # In the first chunk, a learned initial state is not a leaf and has no `.grad`; it is not needed.
            progress.after_gradients = [tensor.grad if tensor.is_leaf else None for tensor in live.state]

    def _roots(
        self, live: _LiveChunk, y_gradient: Tensor | None, after_gradients: list[Tensor | None] | None
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the roots of a chunk's backward, its output and the state after it, and their gradients."""
        assert live.y is not None
        # In a first stage without weights, y depends on nothing that needs a gradient.
        roots, gradients = ([live.y], [y_gradient]) if live.y.requires_grad else ([], [])
        for tensor, gradient in zip(live.after, after_gradients or [None] * len(live.after), strict=True):
            if gradient is not None and tensor.requires_grad:
                roots.append(tensor)
                gradients.append(_pad_rows(gradient, tensor.shape[0]))
        return roots, gradients

    def _input(self, action: Action) -> Tensor:
        edge, _ = self.edges[action.run]
        if edge is not None:
            return edge.receive(action, self.runs[action.run], f"the activations of {action}")
        if self.embedding is not None:
            return self.embedding.take_vectors(action)
        assert self.inputs is not None
        return self.cuts[action.run][0].part(self.inputs, action)

    def _targets(self, action: Action) -> Tensor | None:
        """Return the targets of a chunk; None if its outputs are sent to the next stage, or kept for whole rows."""
        if self.targets is None or self.row_loss_step is not None or not self.runs[action.run].is_last:
            return None
        return self.cuts[action.run][1].part(self.targets, action)

    def _resets(self, action: Action) -> Resets | None:
        """Return where the rows of a chunk start again from their initial state; None if the window has no resets."""
        if self.window.resets is None:
            return None
        cut = self.cuts[action.run][0]
        shape = cut.micro_batches[action.micro_batch]
        first, _ = shape.chunk_bounds[action.chunk]
        rows = self.rows[shape.start : shape.start + shape.rows_per_chunk[action.chunk]]
        return Resets(replace(rows, lengths=rows.lengths - first), cut.part(self.window.resets, action))

    def _drop_ended(self, progress: _MicroBatchProgress, action: Action) -> State:
        """Set aside the states of rows that ended before this chunk; return the state of the others."""
        _, num_rows = self.cuts[action.run][0].dims(action)
        if len(progress.state) and num_rows < progress.state[0].shape[0]:
            progress.ended_states.append(slice_rows(progress.state, slice(num_rows, None)))
            return slice_rows(progress.state, slice(num_rows))
        return progress.state

    def _leaf(self, tensor: Tensor, *, needs_grad: bool) -> Tensor:
        """Return the tensor as a new autograd leaf if `needs_grad`, else unchanged, with its graph if it has one."""
        if not needs_grad:
            return tensor
        leaf = tensor.detach()
        return leaf.requires_grad_(self.has_backward and leaf.is_floating_point())


def _pad_rows(gradient: Tensor, num_rows: int) -> Tensor:
    """Return the gradient with zeros for the rows that were dropped after this chunk."""
    if gradient.shape[0] == num_rows:
        return gradient
    padded = gradient.new_zeros(num_rows, *gradient.shape[1:])
    padded[: gradient.shape[0]] = gradient
    return padded
