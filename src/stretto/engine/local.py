"""LocalEngine: a step on one device, its rows in one or several slices."""

import time
from dataclasses import replace

import torch

from stretto.base.denormals import flush_denormals
from stretto.base.errors import ConfigError
from stretto.base.state import State, detach, join_rows, slice_rows
from stretto.base.window import Window
from stretto.blocks.losses import Loss, LossSum
from stretto.blocks.stack import Stack
from stretto.engine.engine import (
    Arm,
    Outcome,
    Precision,
    add_losses,
    check_precision,
    nothing,
    payload,
    settle,
    square_norm,
)
from stretto.plan.actions import Action, Kind
from stretto.plan.timeline import Span


class LocalEngine:
    """Runs the whole stack on the device its weights are on.

    With several slices the rows go through one part after the other and gradients add up: the same step
    in a part of the memory.
    """

    def __init__(self, stack: Stack, loss: Loss, *, slices: int = 1, precision: Precision = "fp32") -> None:
        if slices < 1:
            raise ConfigError(f"slices={slices} must be at least 1")
        self._stack = stack
        self._loss = loss
        self._slices = slices
        self._precision = check_precision(precision)
        self.spans: list[Span] | None = None
        self._device = stack.device
        if self._device.type == "meta":
            raise ConfigError("the stack's weights are on the meta device; draw them with stretto.initialize first")

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
    waited = 0.0

    @flush_denormals()
    def step(self, window: Window, carried: State | None, key: int, arm: Arm = nothing) -> Outcome:
        """Run forward and backward; leave the gradient of the summed loss in the parameters' `.grad`."""
        self._stack.train()
        self._stack.zero_grad(set_to_none=True)
        return self._run(window, carried, key, arm)

    @torch.no_grad()
    def score(self, window: Window, carried: State | None, key: int) -> Outcome:
        """Run forward only, without dropout and without gradients."""
        self._stack.eval()
        return self._run(window, carried, key, nothing)

    def square_norm(self) -> float:
        """Return the squared norm of the whole gradient."""
        return square_norm(self._stack)

    def add_up(self, values: list[float]) -> list[float]:
        """Return the values: there is nobody else."""
        return values

    def gather(self, values: list[float]) -> list[list[float]]:
        """Return the values of the only rank."""
        return [values]

    def _run(self, window: Window, carried: State | None, key: int, arm: Arm) -> Outcome:
        if self._slices > window.num_rows:
            raise ConfigError(
                f"layout.slices={self._slices} exceeds the batch's {window.num_rows} rows; use at most that many"
            )
        losses, states = [], []
        *others, last = window.slices(self._slices)
        for index, rows in enumerate((*others, last)):
            started = self._now()
            loss, after = self._forward(window[rows], carried and slice_rows(carried, rows), key)
            middle = self._now()
            if loss.total.requires_grad:
                extra = arm() if rows is last else None
                torch.autograd.backward([loss.total] if extra is None else [loss.total, extra])
            if self.spans is not None and torch.is_grad_enabled():
                self.spans.append(Span(0, Action(Kind.FORWARD, index, 0), started, middle))
                self.spans.append(Span(0, Action(Kind.BACKWARD, index, 0), middle, self._now()))
            losses.append(replace(loss, total=loss.total.detach()))
            states.append(detach(after))
        added = add_losses(losses)
        return Outcome(added.total, added.count, join_rows(states), added.right)

    def _now(self) -> float:
        if self.spans is not None and self._device.type != "cpu":
            # Else it would be the time at which work was put into a queue.
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def _forward(self, window: Window, carried: State | None, key: int) -> tuple[LossSum, State]:
        rows = window.rows(key, self._device, self._stack.dtype)
        state = self._stack.begin(rows, carried)
        inputs, targets = payload(window, "inputs", self._stack.dtype), payload(window, "targets")
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision == "bf16"):
            y, after = self._stack(inputs.to(self._device, non_blocking=True), state)
        loss = self._loss(y, targets.to(self._device, non_blocking=True))
        return loss, settle(self._stack, rows, window.num_steps, after)
