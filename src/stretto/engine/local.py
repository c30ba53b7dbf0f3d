"""LocalEngine: a step on one device, its rows in one or several micro-batches."""

import time
from dataclasses import replace

import torch

from stretto.base.denormals import flush_denormals
from stretto.base.errors import ConfigError
from stretto.base.state import State, cat_rows, detach, slice_rows
from stretto.base.window import Window
from stretto.blocks.losses import Loss, LossSum
from stretto.blocks.stack import Stack
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
from stretto.plan.actions import Action, ActionKind
from stretto.plan.timeline import TimedAction


class LocalEngine:
    """Runs the whole stack on the device its weights are on.

    With several micro-batches the rows go through one part after the other and gradients add up: the same step
    in a part of the memory.
    """

    def __init__(self, stack: Stack, loss: Loss, *, micro_batches: int = 1, precision: Precision = "fp32") -> None:
        if micro_batches < 1:
            raise ConfigError(f"micro_batches={micro_batches} must be at least 1")
        self._stack = stack
        self._loss = loss
        self.num_micro_batches = micro_batches
        self._precision = check_precision(precision)
        self.recorded_actions: list[TimedAction] | None = None
        self._device = stack.device
        if self._device.type == "meta":
            raise ConfigError("the stack's weights are on the meta device; draw them with stretto.nn.initialize first")

    @property
    def stack(self) -> Stack:
        return self._stack

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def is_causal(self) -> bool:
        return self._stack.causal

    @property
    def needs_inputs(self) -> bool:
        return True

    @property
    def needs_targets(self) -> bool:
        return True

    num_replicas = 1
    replica = 0
    stage = 0
    wait_seconds = 0.0

    @flush_denormals()
    def step(
        self, window: Window, carried: State | None, key: int, before_last_backward: BeforeLastBackward = no_op
    ) -> StepResult:
        """Run forward and backward; leave the gradient of the summed loss in the parameters' `.grad`."""
        self._stack.train()
        self._stack.zero_grad(set_to_none=True)
        return self._run(window, carried, key, before_last_backward)

    @torch.no_grad()
    def eval_step(self, window: Window, carried: State | None, key: int) -> StepResult:
        """Run forward only, without dropout and without gradients."""
        self._stack.eval()
        return self._run(window, carried, key, no_op)

    def squared_grad_norm(self) -> float:
        """Return the squared norm of the whole gradient."""
        return squared_grad_norm(self._stack)

    def all_reduce(self, values: list[float]) -> list[float]:
        """Return the values: there is nobody else."""
        return values

    def gather(self, values: list[float]) -> list[list[float]]:
        """Return the values of the only rank."""
        return [values]

    def _run(
        self, window: Window, carried: State | None, key: int, before_last_backward: BeforeLastBackward
    ) -> StepResult:
        if self.num_micro_batches > window.num_rows:
            raise ConfigError(
                f"layout.micro_batches={self.num_micro_batches} exceeds the batch's {window.num_rows} rows; use at most that many"
            )
        losses, states = [], []
        *others, last = window.micro_batches(self.num_micro_batches)
        for index, rows in enumerate((*others, last)):
            started = self._now()
            loss, after = self._forward(window[rows], carried and slice_rows(carried, rows), key)
            middle = self._now()
            if loss.total.requires_grad:
                extra = before_last_backward() if rows is last else None
                torch.autograd.backward([loss.total] if extra is None else [loss.total, extra])
            if self.recorded_actions is not None and torch.is_grad_enabled():
                self.recorded_actions.append(TimedAction(0, Action(ActionKind.FORWARD, index, 0), started, middle))
                self.recorded_actions.append(TimedAction(0, Action(ActionKind.BACKWARD, index, 0), middle, self._now()))
            losses.append(replace(loss, total=loss.total.detach()))
            states.append(detach(after))
        added = sum_losses(losses)
        return StepResult(added.total, added.count, cat_rows(states), added.num_correct)

    def _now(self) -> float:
        if self.recorded_actions is not None and self._device.type != "cpu":
            # Else it would be the time at which work was put into a queue.
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def _forward(self, window: Window, carried: State | None, key: int) -> tuple[LossSum, State]:
        rows = window.rows(key, self._device, self._stack.dtype)
        state = self._stack.begin(rows, carried)
        inputs, targets = window_tensor(window, "inputs", self._stack.dtype), window_tensor(window, "targets")
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision == "bf16"):
            y, after = self._stack(inputs.to(self._device, non_blocking=True), state)
        loss = self._loss(y, targets.to(self._device, non_blocking=True))
        return loss, reset_ended_rows(self._stack, rows, window.num_steps, after)
