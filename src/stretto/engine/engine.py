"""The seam that every engine fits: one window in, gradients of its summed loss and the next state out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from stretto.base.errors import ConfigError, DataError
from stretto.base.state import State, detach, where_rows
from stretto.base.window import Rows, Window
from stretto.blocks.losses import LossSum
from stretto.blocks.stack import Stack
from stretto.plan.timeline import TimedAction

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class StepResult:
    """What a window gave on this rank. Summed over all ranks, totals and counts are those of the global batch."""

    total: Tensor  # [] the summed loss
    count: Tensor  # [] how much was asked
    state: State  # of this rank's rows and blocks, detached: what the next window starts from
    num_correct: Tensor | None = None  # [] how many answers were right, if the loss can say so


class Engine(Protocol):
    """Runs windows through a stack. How a step is cut is the engine's own affair; what it computes is not.

    `key` names the step's randomness. `carried` is the state of the previous outcome, or none at the start.
    """

    @property
    def stack(self) -> Stack:
        """The blocks this rank holds; their parameters are the ones to optimise."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def is_causal(self) -> bool:
        """Does no block of the whole model, on whatever rank, look ahead in time?"""
        ...

    @property
    def needs_inputs(self) -> bool:
        """Does this rank read a window's inputs? Others know only who is in it."""
        ...

    @property
    def needs_targets(self) -> bool: ...

    @property
    def num_replicas(self) -> int:
        """How many replicas there are; `replica` says which of them this rank is part of."""
        ...

    @property
    def replica(self) -> int: ...

    @property
    def num_micro_batches(self) -> int:
        """How many micro-batches a replica's rows are split into; each window needs at least as many rows."""
        ...

    @property
    def stage(self) -> int:
        """Which stage of its replica this rank is."""
        ...

    @property
    def wait_seconds(self) -> float:
        """How many seconds this rank has waited for others since the engine was made."""
        ...

    # A list put here collects when each action ran, for those who measure.
    recorded_actions: list[TimedAction] | None

    def step(
        self, window: Window, carried: State | None, key: int, before_last_backward: "BeforeLastBackward" = ...
    ) -> StepResult:
        """Run forward and backward; leave the gradient of the *summed* loss in the parameters' `.grad`.

        `before_last_backward` is called just before the last backward of the step, for those who reduce gradients while it runs.
        """
        ...

    def eval_step(self, window: Window, carried: State | None, key: int) -> StepResult:
        """Run forward only, without dropout and without gradients."""
        ...

    def squared_grad_norm(self) -> float:
        """Return this rank's part of the squared norm of the whole gradient; the parts add up, each weight once."""
        ...

    def all_reduce(self, values: list[float]) -> list[float]:
        """Return the sums of each value over all ranks of the engine."""
        ...

    def gather(self, values: list[float]) -> list[list[float]] | None:
        """Return the values of all ranks, rank by rank, on the first of them; some may give more than others."""
        ...


def check_precision(precision: Precision) -> Precision:
    """Refuse a precision that no engine has."""
    if precision not in ("fp32", "bf16"):
        raise ConfigError(f"precision={precision!r} is not fp32 or bf16; use one of these")
    return precision


def window_tensor(window: Window, what: Literal["inputs", "targets"], dtype: torch.dtype | None = None) -> Tensor:
    """Return a window's inputs or targets, real numbers in `dtype`; refuse a window that was read without them."""
    tensor = window.inputs if what == "inputs" else window.targets
    if tensor is None:
        raise DataError(f"the window has no {what}, which this rank needs; read it with {what}=True")
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


BeforeLastBackward = Callable[[], Tensor | None]
"""Called just before the last backward of a step; a tensor that it returns goes through that backward too."""


def no_op() -> None:
    """What an engine calls before its last backward when nobody asked for more."""


def sum_losses(losses: Sequence[LossSum]) -> LossSum:
    """Return the sum of some losses; of none, on a rank that has no targets, zero."""
    if not losses:
        return LossSum(torch.zeros(()), torch.zeros((), dtype=torch.int64))
    rights = [loss.num_correct for loss in losses if loss.num_correct is not None]
    return LossSum(
        torch.stack([loss.total for loss in losses]).sum(),
        torch.stack([loss.count for loss in losses]).sum(),
        torch.stack(rights).sum() if len(rights) == len(losses) else None,
    )


def reset_ended_rows(stack: Stack, rows: Rows, num_steps: int, after: State) -> State:
    """Return the state that a window hands on: of a row that ended within it, nothing is left but a fresh start.

    What such a row's state has become while others went on depends on how the window was cut, so it may not matter.
    """
    return where_rows(rows.lengths < num_steps, detach(stack.initial_state(rows)), after)


def squared_grad_norm(stack: Stack) -> float:
    """Return the squared norm of a stack's gradient."""
    gradients = [parameter.grad for parameter in stack.parameters() if parameter.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients)) ** 2 if gradients else 0.0
