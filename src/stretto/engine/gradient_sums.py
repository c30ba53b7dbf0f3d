"""GradientSums: sums the gradients of a step with many backwards, and hands each sum over once, when it is complete.

DDP's reducer must see each gradient once per step. Spans run a backward per sweep and micro-batch, in an order in which
one parameter's gradient is complete long before another's, so buckets are reduced while other sweeps still run:

    B(0,3) B(0,2) B(1,3) B(1,2) | B(0,1) ...        (micro-batch, sweep)
                                └ the weights of the last layer are complete: their bucket is reduced from here on

All ranks hand over the gradients of a layer at the same time of their common clock (`span_order`): a rank that has no
backward of a layer waits, like the others, until it is complete.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stretto.engine.engine import BeforeLastBackward


class GradientSums:
    """Sums gradients by parameter; `layers` has the parameters whose gradients are complete after each layer.

    `begin` is called before the first sum is handed over. It may prepare a reducer; the roots that it returns are not
    needed, because every parameter is handed over here.
    """

    def __init__(self, layers: Sequence[Sequence[nn.Parameter]], begin: BeforeLastBackward) -> None:
        self._layers = layers
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._begin: BeforeLastBackward | None = begin

    def add(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one backward."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                before = self._sums.get(parameter)
                # Not in place: oneDNN returns one tensor as the gradient of both biases.
                self._sums[parameter] = gradient if before is None else before + gradient

    def hand_over(self, layer: int) -> None:
        """Hand over the sums of a layer, also without a gradient on this rank: other ranks may have one."""
        parameters = [parameter for parameter in self._layers[layer] if parameter.requires_grad]
        if not parameters:
            return
        if self._begin is not None:
            self._begin()
            self._begin = None
        root = _CompleteGradients.apply([self._sums.pop(parameter, None) for parameter in parameters], *parameters)  # type: ignore[no-untyped-call]
        torch.autograd.backward([root])
        assert layer or not self._sums, "a backward has used a weight that was already handed over"


class _CompleteGradients(torch.autograd.Function):
    """A zero whose backward gives the parameters these gradients; a parameter without one gets none."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor | None], *parameters: Tensor) -> Tensor:  # noqa: ANN401
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        complete, ctx.gradients = ctx.gradients, ()  # not kept, so that autograd need not copy them
        return (None, *complete)
