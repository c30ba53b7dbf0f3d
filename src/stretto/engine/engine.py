"""The seam that every engine fits: one window in, gradients of its summed loss and the next state out."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stretto.base.state import State
from stretto.base.window import Window
from stretto.blocks.stack import Stack


@dataclass(frozen=True)
class Outcome:
    """What a window gave: loss and count over the whole global batch, and this engine's rows' state after it."""

    total: Tensor  # [] the summed loss
    count: Tensor  # [] how much was asked
    state: State  # detached: values that the next window starts from


class Engine(Protocol):
    """Runs windows through a stack. How a step is cut is the engine's own affair; what it computes is not.

    `key` names the step's randomness. `carried` is the state of the previous outcome, or none at the start.
    """

    @property
    def stack(self) -> Stack:
        """The blocks this engine holds; its parameters are the ones to optimise."""
        ...

    @property
    def device(self) -> torch.device: ...

    def step(self, window: Window, carried: State | None, key: int) -> Outcome:
        """Run forward and backward; leave the gradient of the *summed* loss in the parameters' `.grad`."""
        ...

    def score(self, window: Window, carried: State | None, key: int) -> Outcome:
        """Run forward only, without dropout and without gradients."""
        ...

    def gradient_norm(self) -> Tensor:
        """Return the norm of the whole gradient, each parameter of the model counted once."""
        ...
