"""GradientSums: sums the gradients of a step with many backwards, and hands each sum over once, when it is complete.

DDP's reducer must see each gradient once per step. Spans run a backward per sweep and micro-batch, in an order in which
one parameter's gradient is complete long before another's, so buckets are reduced while other sweeps still run:

    B(0,3) B(0,2) B(1,3) B(0,1) B(1,2) ...        (micro-batch, sweep)
                    |             └ the weights of sweep 2 are complete
                    └ the weights of sweep 3 are complete: their bucket is reduced from here on
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stretto.engine.engine import BeforeLastBackward


class GradientSums:
    """Sums gradients by parameter; `uses` has the parameters of each backward that this rank will run.

    `begin` is called before the first sum is handed over. It may prepare a reducer; the roots that it returns are not
    needed, because every parameter is handed over here.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], uses: Iterable[Sequence[nn.Parameter]], begin: BeforeLastBackward
    ) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._num_left = Counter(parameter for used in uses for parameter in set(used))
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._begin: BeforeLastBackward | None = begin

    def hand_over_unused(self) -> None:
        """Hand over the parameters that no backward of this rank uses: other ranks may have a gradient of them."""
        self._hand_over([parameter for parameter in self._parameters if not self._num_left[parameter]])

    def add(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one backward; hand over the sums that are complete."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                before = self._sums.get(parameter)
                # Not in place: oneDNN returns one tensor as the gradient of both biases.
                self._sums[parameter] = gradient if before is None else before + gradient
        complete = []
        for parameter in dict.fromkeys(parameter for parameter in parameters if parameter.requires_grad):
            self._num_left[parameter] -= 1
            if not self._num_left[parameter]:
                complete.append(parameter)
        self._hand_over(complete)

    def _hand_over(self, parameters: Sequence[nn.Parameter]) -> None:
        if not parameters:
            return
        if self._begin is not None:
            self._begin()
            self._begin = None
        root = _CompleteGradients.apply([self._sums.pop(parameter, None) for parameter in parameters], *parameters)  # type: ignore[no-untyped-call]
        torch.autograd.backward([root])


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
