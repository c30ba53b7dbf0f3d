"""LocalEngine: runs training steps on one device, with the rows in one or several micro-batches."""

from dataclasses import replace

import torch
from torch import Tensor

from stretto.base.denormals import flush_denormals
from stretto.base.device_copy import to_device
from stretto.base.errors import ConfigError
from stretto.base.resets import Resets
from stretto.base.state import State, cat_rows, detach, slice_rows
from stretto.base.window import Window
from stretto.blocks.cast_weights import CastWeights, rnn_modules
from stretto.blocks.check_widths import ModelInput
from stretto.blocks.loss_weights import attach_loss
from stretto.blocks.losses import Loss, LossSum
from stretto.blocks.row_loss import RowLoss, call_row_loss
from stretto.blocks.row_summary import find_unsummarized
from stretto.blocks.stack import Stack
from stretto.blocks.torch_losses import as_loss
from stretto.engine.engine import (
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
from stretto.engine.strided_targets import stride_window
from stretto.engine.tied_weights import TiedWeights
from stretto.mesh.mesh import Mesh
from stretto.mesh.topology import Topology
from stretto.mesh.world import World
from stretto.plan.actions import Action, ActionKind


class LocalEngine:
    """Runs the whole stack on the device of its weights: the reference that all layouts are compared with.

    Several micro-batches run one after the other and their gradients accumulate: the same step in less memory.
    """

    def __init__(self, stack: Stack, loss: Loss, *, micro_batches: int = 1, precision: Precision = "fp32") -> None:
        if micro_batches < 1:
            raise ConfigError(f"micro_batches={micro_batches} must be at least 1")
        stack = attach_loss(stack, loss)
        if any(parameter.is_meta for parameter in stack.parameters()):
            raise ConfigError("the stack's weights are on the meta device; create them with stretto.nn.initialize")
        self._device = stack.device
        self.stack = stack.to(self._device)
        self.mesh = Mesh(World(rank=0, size=1, device=self._device), Topology(1, 1))
        self.is_causal = stack.causal
        self.stride = stack.stride
        self.unsummarized = find_unsummarized(stack)
        self.model_input = ModelInput.of(stack)
        self.num_micro_batches = micro_batches
        self.reads_targets = True
        self.reads_inputs = True
        self.tied_weights = TiedWeights(stack, {})  # there is one stage
        self.recorder = ActionRecorder(self._device)
        self._loss = as_loss(loss)
        self.row_loss = self._loss if isinstance(self._loss, RowLoss) else None
        self.has_whole_rows = True
        self.precision = check_precision(precision, stack)
        self._cast_weights = CastWeights(rnn_modules(stack), compute_dtype(precision))

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
        """Run forward and backward; leave the gradient of the summed loss in the parameters' `.grad`."""
        self.stack.train()
        self.stack.zero_grad(set_to_none=True)
        with self._cast_weights.for_step():
            return self._run(window, carried, key, before_last_backward, loss_scale)

    @torch.no_grad()
    def eval_step(
        self, window: Window, carried: State | None, key: int, on_outputs: OnOutputs | None = None
    ) -> StepResult:
        """Run forward only, without dropout and without gradients."""
        self.stack.eval()
        with self._cast_weights.for_step():
            return self._run(window, carried, key, no_op, 1.0, on_outputs)

    def squared_grad_norm(self) -> Tensor:
        """Return the squared norm of the gradient."""
        return squared_grad_norm(self.stack, self._device)

    def _run(
        self,
        window: Window,
        carried: State | None,
        key: int,
        before_last_backward: BeforeLastBackward,
        loss_scale: float,
        on_outputs: OnOutputs | None = None,
    ) -> StepResult:
        if self.num_micro_batches > window.num_rows:
            raise ConfigError(
                f"micro_batches={self.num_micro_batches} exceeds the batch's number of rows; "
                f"use at most {window.num_rows}"
            )
        check_resets(self, window)
        if self.stride > 1 and (self.row_loss is None or self.row_loss.targets_per_step):
            window = stride_window(window, self.stride)
        losses, states = [], []
        for index, rows in enumerate(window.micro_batches(self.num_micro_batches)):
            carried_rows = None if carried is None else slice_rows(carried, rows)
            with self.recorder.action(0, Action(ActionKind.FORWARD, index, 0)):
                loss, after = self._forward(window[rows], carried_rows, key, on_outputs)
            if torch.is_grad_enabled():
                with self.recorder.action(0, Action(ActionKind.BACKWARD, index, 0)):
                    # A micro-batch without targets may have a loss without a graph.
                    roots = [loss.total] if loss.total.requires_grad else []
                    gradients: list[Tensor | None] = [torch.full_like(root, loss_scale) for root in roots]
                    if index == self.num_micro_batches - 1:
                        roots += [*before_last_backward(), *self._cast_weights.roots_of_last_backward()]
                        gradients += [None] * (len(roots) - len(gradients))
                    if roots:
                        torch.autograd.backward(roots, gradients)
            losses.append(replace(loss, total=loss.total.detach()))
            states.append(detach(after))
        return step_result(losses, cat_rows(states), self._device)

    def _forward(
        self, window: Window, carried: State | None, key: int, on_outputs: OnOutputs | None
    ) -> tuple[LossSum, State]:
        rows = window.rows(key, self._device, self.stack.dtype)
        state = self.stack.begin(rows, carried)
        inputs, targets = window_tensor(window, "inputs", self.stack.dtype), window_tensor(window, "targets")
        with autocast(self._device, self.precision):
            x = to_device(inputs, self._device)
            if window.resets is None:
                y, after = self.stack(x, state)
            else:
                y, after = self.stack.run_with_resets(x, state, Resets(rows, window.resets))
        loss = self._compute_loss(y, targets, rows.after_stride(self.stride).lengths, on_outputs)
        return loss, reset_ended_rows(self.stack, rows, window, after)

    def _compute_loss(self, y: Tensor, targets: Tensor, lengths: Tensor, on_outputs: OnOutputs | None) -> LossSum:
        if self.row_loss is not None:
            loss = call_row_loss(self.row_loss, y, targets, lengths)
            if on_outputs is not None:
                predictions = self.row_loss.predictions(y, lengths)
                targets = targets[: len(y)] if self.row_loss.targets_per_step else targets
                on_outputs(predictions, to_device(targets, self._device))
            return loss
        return compute_loss(self._loss, y, to_device(targets, self._device), on_outputs)
