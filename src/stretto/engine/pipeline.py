"""PipelineEngine: one stage's part of a step, cut over rows and over time.

The engine takes the actions of its stage one by one, exactly as plan/ simulated and drew them. At a chunk's edge the
state is detached; the gradient that comes back to it is fed by hand into the backward of the chunk before: exact
backpropagation through the whole window.

        x ──► blocks ──► y ──► next stage          F: keep (x, state, y, after), send y
    state ──►        ──► after ──► next chunk      B: backward from dy and d(after), send dx, hand d(state) on
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from stretto.base.denormals import flush_denormals
from stretto.base.errors import ConfigError
from stretto.base.state import State, cat_rows, detach, slice_rows
from stretto.base.window import Window
from stretto.blocks.losses import Loss, LossSum
from stretto.blocks.stack import Stack
from stretto.config.layout import Layout
from stretto.engine.boundary import BoundarySpec, infer_boundaries
from stretto.engine.cut import MicroBatchCut, WindowCut, cut_window
from stretto.engine.engine import (
    BeforeLastBackward,
    Precision,
    StepResult,
    check_precision,
    no_op,
    reset_ended_rows,
    squared_grad_norm,
    sum_losses,
    window_tensor,
)
from stretto.mesh.mesh import Mesh
from stretto.plan.actions import Action, ActionKind
from stretto.plan.schedule import forward_schedule, stage_schedule
from stretto.plan.timeline import TimedAction


@dataclass
class _LiveChunk:
    """A chunk between its forward and its backward."""

    x: Tensor  # a leaf
    state: State  # leaves
    y: Tensor | None = None  # what was sent, or the summed loss on the last stage; none if it will be computed again
    after: State = ()


@dataclass
class _MicroBatchProgress:
    """How far one micro-batch is in time."""

    state: State  # what its next forward starts from
    ended_states: list[State] = field(
        default_factory=list
    )  # final states of rows that have ended, those that ended first first
    gradients: list[Tensor | None] | None = None  # of the state its next backward ends with


class PipelineEngine:
    """Runs one stage of a model. Neighbouring stages are ranks of their own; with one stage, it is all here.

    `stack` is this rank's stage, and must be causal if `layout.chunks` is more than one.
    """

    def __init__(
        self,
        stack: Stack,
        loss: Loss,
        layout: Layout,
        mesh: Mesh,
        *,
        precision: Precision = "fp32",
        is_causal: bool | None = None,  # of the whole model; of this stage, if not given
    ) -> None:
        self.stack = stack
        self.is_causal = stack.causal if is_causal is None else is_causal
        self.mesh = mesh
        self.layout = layout
        self._loss = loss
        self._precision = check_precision(precision)
        self._boundaries: tuple[BoundarySpec | None, BoundarySpec | None] | None = None
        self.num_windows = 0  # begun since this engine was made
        self.recorded_actions: list[TimedAction] | None = (
            None  # a list put here collects when each action ran, for those who measure
        )

    @property
    def device(self) -> torch.device:
        return self.mesh.world.device

    @property
    def needs_inputs(self) -> bool:
        return self.mesh.is_first_stage

    @property
    def needs_targets(self) -> bool:
        return self.mesh.is_last_stage

    # More of them are a replica engine's affair.
    num_replicas = 1
    replica = 0

    @property
    def num_micro_batches(self) -> int:
        return self.layout.micro_batches

    @property
    def stage(self) -> int:
        return self.mesh.stage

    @property
    def wait_seconds(self) -> float:
        return self.mesh.world.wait_timer.seconds

    @flush_denormals()
    def step(
        self, window: Window, carried: State | None, key: int, before_last_backward: BeforeLastBackward = no_op
    ) -> StepResult:
        """Take this stage's actions; leave the gradient of the summed loss in the parameters' `.grad`."""
        self.stack.train()
        self.stack.zero_grad(set_to_none=True)
        cut = self._cut(window)
        actions = stage_schedule(self.mesh.stage, self.mesh.num_stages, len(cut.micro_batches), cut.num_chunks)
        return _PipelineStep(self, window, cut, carried, key, before_last_backward).run(actions)

    @torch.no_grad()
    def eval_step(self, window: Window, carried: State | None, key: int) -> StepResult:
        """Take the forwards only, without dropout and without gradients."""
        self.stack.eval()
        cut = self._cut(window)
        return _PipelineStep(self, window, cut, carried, key, no_op).run(
            forward_schedule(len(cut.micro_batches), cut.num_chunks)
        )

    def squared_grad_norm(self) -> float:
        """Return the squared norm of this stage's gradient."""
        return squared_grad_norm(self.stack)

    def all_reduce(self, values: list[float]) -> list[float]:
        """Return the sums over all stages."""
        return self.mesh.world.all_reduce(values)

    def gather(self, values: list[float]) -> list[list[float]] | None:
        """Return the values of all stages, on the first."""
        return self.mesh.world.gather(values)

    def _cut(self, window: Window) -> WindowCut:
        if self.layout.micro_batches > window.num_rows:
            raise ConfigError(
                f"layout.micro_batches={self.layout.micro_batches} exceeds a replica's {window.num_rows} rows; use at most that many"
            )
        return cut_window(window, self.layout.micro_batches, self.layout.chunks)

    def boundaries(self, window: Window) -> tuple[BoundarySpec | None, BoundarySpec | None]:
        """Return what a step of one row looks like where it enters this stage and where it leaves it."""
        if self._boundaries is None:
            with self.autocast(), torch.no_grad():
                self._boundaries = infer_boundaries(self.stack, self.mesh, window)
        return self._boundaries

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._precision == "bf16")

    def run_blocks(self, x: Tensor, state: State, targets: Tensor | None) -> tuple[Tensor | LossSum, State]:
        """Run the stage over one chunk; return what it sends on, or the loss if there are targets."""
        with self.autocast():
            y, after = self.stack(x, state)
        return (y if targets is None else self._loss(y, targets)), after


class _PipelineStep:
    """One step of one stage: what is alive while its actions are taken."""

    def __init__(
        self,
        engine: PipelineEngine,
        window: Window,
        cut: WindowCut,
        carried: State | None,
        key: int,
        before_last_backward: BeforeLastBackward,
    ) -> None:
        self.engine = engine
        self.mesh = engine.mesh
        self.window = window
        self.cut = cut
        self.before_last_backward = before_last_backward
        engine.num_windows += 1
        self.keeps_graph = torch.is_grad_enabled()
        self.recompute = engine.layout.recompute
        self.live: dict[tuple[int, int], _LiveChunk] = {}
        self.losses: list[LossSum] = []
        self.rows = window.rows(key, engine.device, engine.stack.dtype)
        # Each micro-batch begins by itself, so that a learned initial state has a graph of its own to be backwarded through.
        self.progress = [
            _MicroBatchProgress(
                engine.stack.begin(self.rows[part.rows], None if carried is None else _pick(carried, part))
            )
            for part in cut.micro_batches
        ]

    def run(self, actions: list[Action]) -> StepResult:
        """Take the actions in order; return what this stage has to say of the step."""
        actions = [action for action in actions if self.cut.shape(action)[1]]
        self._post_receives(actions)
        last_backward = next((action for action in reversed(actions) if action.kind is ActionKind.BACKWARD), None)
        for action in actions:
            self.mesh.world.set_status(f"in {action} of window {self.engine.num_windows}")
            if action.kind is ActionKind.FORWARD:
                self._forward(action)
            else:
                self._backward(action, is_last=action is last_backward)
        if self.mesh.forward_channel is not None and self.mesh.backward_channel is not None:
            self.mesh.forward_channel.flush()
            self.mesh.backward_channel.flush()
        self.mesh.world.set_status(f"after window {self.engine.num_windows}")
        loss = sum_losses(self.losses)
        state = reset_ended_rows(self.engine.stack, self.rows, self.window.num_steps, self._final_state())
        return StepResult(loss.total, loss.count, state, loss.num_correct)

    def _post_receives(self, actions: list[Action]) -> None:
        """Post the first receives; shapes are known from the lengths, so nothing is negotiated."""
        if self.mesh.forward_channel is None or self.mesh.backward_channel is None:
            return
        before, after = self.engine.boundaries(self.window)
        if before is not None:
            self.mesh.forward_channel.post_receives(self._buffers(actions, ActionKind.FORWARD, before))
        if after is not None:
            self.mesh.backward_channel.post_receives(self._buffers(actions, ActionKind.BACKWARD, after))

    def _buffers(self, actions: list[Action], kind: ActionKind, edge: BoundarySpec) -> Iterator[Tensor]:
        return (edge.empty(self.cut.shape(action), self.engine.device) for action in actions if action.kind is kind)

    def _forward(self, action: Action) -> None:
        progress = self.progress[action.micro_batch]
        x, state = self._input(action), progress.state
        started = self._now()
        if action.chunk:
            state = self._drop_ended(progress, action)
        live = _LiveChunk(
            self._leaf(x, not self.mesh.is_first_stage), tuple(self._leaf(t, action.chunk > 0) for t in state)
        )
        with torch.set_grad_enabled(self.keeps_graph and not self.recompute):
            y, after = self.engine.run_blocks(live.x, live.state, self._targets(action))
        progress.state = detach(after)
        if isinstance(y, LossSum):
            self.losses.append(replace(y, total=y.total.detach()))
            y = y.total
        elif self.mesh.forward_channel is not None:
            self.mesh.forward_channel.send(y.detach())
        if self.keeps_graph:
            if not self.recompute:
                live.y, live.after = y, after
            self.live[action.micro_batch, action.chunk] = live
        self._record(action, started)

    def _backward(self, action: Action, is_last: bool) -> None:
        progress, live = self.progress[action.micro_batch], self.live.pop((action.micro_batch, action.chunk))
        gradient = None
        if not self.mesh.is_last_stage:
            assert self.mesh.backward_channel is not None
            gradient = self.mesh.backward_channel.receive(f"the gradient of {action}")
        started = self._now()
        if live.y is None:
            y, live.after = self.engine.run_blocks(live.x, live.state, self._targets(action))
            live.y = y.total if isinstance(y, LossSum) else y
        outputs: list[Tensor] = []
        gradients: list[Tensor | None] = []
        # A stage without weights, at the start of the line, has nothing to take a gradient of.
        if live.y.requires_grad:
            outputs.append(live.y)
            gradients.append(gradient)
        for tensor, from_next in zip(live.after, progress.gradients or [None] * len(live.after), strict=True):
            if from_next is not None and tensor.requires_grad:
                outputs.append(tensor)
                gradients.append(_pad_rows(from_next, len(tensor)))
        extra = self.before_last_backward() if is_last else None
        if extra is not None:
            outputs.append(extra)
            gradients.append(None)
        if outputs:
            torch.autograd.backward(outputs, gradients)
        progress.gradients = [leaf.grad if leaf.is_leaf else None for leaf in live.state]
        if not self.mesh.is_first_stage:
            assert self.mesh.backward_channel is not None
            self.mesh.backward_channel.send(torch.zeros_like(live.x) if live.x.grad is None else live.x.grad)
        self._record(action, started)

    def _record(self, action: Action, started: float) -> None:
        if self.engine.recorded_actions is not None:
            self.engine.recorded_actions.append(TimedAction(self.mesh.stage, action, started, self._now()))

    def _now(self) -> float:
        if self.engine.recorded_actions is not None and self.engine.device.type != "cpu":
            # Else it would be the time at which work was put into a queue.
            torch.accelerator.synchronize(self.engine.device)
        return time.perf_counter()

    def _input(self, action: Action) -> Tensor:
        if self.mesh.forward_channel is not None and not self.mesh.is_first_stage:
            return self.mesh.forward_channel.receive(f"the activations of {action}")
        return self._part(window_tensor(self.window, "inputs", self.engine.stack.dtype), action)

    def _targets(self, action: Action) -> Tensor | None:
        if not self.mesh.is_last_stage:
            return None
        return self._part(window_tensor(self.window, "targets"), action)

    def _part(self, tensor: Tensor, action: Action) -> Tensor:
        """The steps and rows of the window that an action works on."""
        micro_batch_cut = self.cut.micro_batches[action.micro_batch]
        start, stop = micro_batch_cut.chunk_bounds[action.chunk]
        num_rows = micro_batch_cut.rows_per_chunk[action.chunk]
        if micro_batch_cut.is_sorted:
            first = int(micro_batch_cut.rows[0])
            part = tensor[start:stop, first : first + num_rows]
        else:
            part = tensor[start:stop].index_select(1, micro_batch_cut.rows[:num_rows].to(tensor.device))
        return part.to(self.engine.device, non_blocking=True)

    def _drop_ended(self, progress: _MicroBatchProgress, action: Action) -> State:
        """Let rows go that ended before this chunk; return the state of those that go on."""
        num_rows = self.cut.micro_batches[action.micro_batch].rows_per_chunk[action.chunk]
        if len(progress.state) and num_rows < len(progress.state[0]):
            progress.ended_states.append(slice_rows(progress.state, slice(num_rows, None)))
            return slice_rows(progress.state, slice(num_rows))
        return progress.state

    def _leaf(self, tensor: Tensor, needs_gradient: bool) -> Tensor:
        if not needs_gradient:
            # The input of the first stage, or a state that a window begins with: its own graph, if any, goes on.
            return tensor
        leaf = tensor.detach()
        return leaf.requires_grad_(self.keeps_graph and leaf.is_floating_point())

    def _final_state(self) -> State:
        """Put the rows' final states back into the window's order."""
        parts = [cat_rows([progress.state, *reversed(progress.ended_states)]) for progress in self.progress]
        joined = cat_rows(parts)
        if all(micro_batch_cut.is_sorted for micro_batch_cut in self.cut.micro_batches):
            return joined
        places = torch.cat([micro_batch_cut.rows for micro_batch_cut in self.cut.micro_batches]).argsort()
        return tuple(tensor[places.to(tensor.device)] for tensor in joined)


def _pick(state: State, micro_batch_cut: MicroBatchCut) -> State:
    if micro_batch_cut.is_sorted:
        first = int(micro_batch_cut.rows[0])
        return slice_rows(state, slice(first, first + len(micro_batch_cut.rows)))
    return tuple(tensor[micro_batch_cut.rows.to(tensor.device)] for tensor in state)


def _pad_rows(gradient: Tensor, num_rows: int) -> Tensor:
    """Rows that left after this chunk give no gradient back."""
    if len(gradient) == num_rows:
        return gradient
    padded = gradient.new_zeros(num_rows, *gradient.shape[1:])
    padded[: len(gradient)] = gradient
    return padded
