"""LocalEngine: a step on one device, its rows in one or several slices."""

from typing import Literal

import torch
from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.base.state import State, detach, join_rows, slice_rows
from stretto.base.window import Window
from stretto.blocks.losses import Loss, LossSum
from stretto.blocks.stack import Stack
from stretto.engine.engine import Outcome

Precision = Literal["fp32", "bf16"]


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
        self._precision = precision
        self._device = next((parameter.device for parameter in stack.parameters()), torch.device("cpu"))
        if self._device.type == "meta":
            raise ConfigError("the stack's weights are on the meta device; draw them with stretto.initialize first")

    @property
    def stack(self) -> Stack:
        return self._stack

    @property
    def device(self) -> torch.device:
        return self._device

    def step(self, window: Window, carried: State | None, key: int) -> Outcome:
        """Run forward and backward; leave the gradient of the summed loss in the parameters' `.grad`."""
        if self._slices > window.num_rows:
            raise ConfigError(
                f"layout.slices={self._slices} exceeds the batch's {window.num_rows} rows; use at most that many"
            )
        self._stack.train()
        self._stack.zero_grad(set_to_none=True)
        outcomes = []
        for rows in window.slices(self._slices):
            loss, after = self._forward(window[rows], carried and slice_rows(carried, rows), key)
            loss.total.backward()  # type: ignore[no-untyped-call]
            outcomes.append(Outcome(loss.total.detach(), loss.count, detach(after)))
        return _add(outcomes)

    @torch.no_grad()
    def score(self, window: Window, carried: State | None, key: int) -> Outcome:
        """Run forward only, without dropout and without gradients."""
        self._stack.eval()
        loss, after = self._forward(window, carried, key)
        return Outcome(loss.total, loss.count, after)

    def gradient_norm(self) -> Tensor:
        """Return the norm of the whole gradient."""
        gradients = [parameter.grad for parameter in self._stack.parameters() if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    def _forward(self, window: Window, carried: State | None, key: int) -> tuple[LossSum, State]:
        state = self._stack.begin(window.rows(key, self._device), carried)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision == "bf16"):
            y, after = self._stack(window.inputs.to(self._device, non_blocking=True), state)
        return self._loss(y, window.targets.to(self._device, non_blocking=True)), after


def _add(outcomes: list[Outcome]) -> Outcome:
    return Outcome(
        total=torch.stack([outcome.total for outcome in outcomes]).sum(),
        count=torch.stack([outcome.count for outcome in outcomes]).sum(),
        state=join_rows([outcome.state for outcome in outcomes]),
    )
