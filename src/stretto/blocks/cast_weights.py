"""CastWeights: the weights of torch's RNN modules in bf16 or fp16, cast once per step instead of once per call.

A step calls each module once per micro-batch and chunk. All calls use one copy of the module, whose weights are in one
buffer on GPUs, as cuDNN requires. The gradients of the calls are summed in the weights' own dtype, and the weights get
the sum in the step's last backward, so DDP sees each gradient once:

    weights (fp32) ── cast once ──► copy (bf16) ──► calls 0, 1, 2, ...
    .grad   (fp32) ◄── last backward ── sum (fp32) ◄── gradients (bf16) of each call
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from stretto.base.foreach import add_all, copy_all
from stretto.blocks.cudnn_weights import flatten_bf16


class CastRnn:
    """A copy of an RNN module that computes in `dtype`; its gradients go to the weights of the module itself."""

    def __init__(self, rnn: nn.RNNBase, dtype: torch.dtype) -> None:
        self.rnn = rnn
        self.dtype = dtype
        self.is_last_backward = True  # whether the next backward hands its gradients over; else they are summed
        self._sums: list[Tensor] | None = None
        self._copy = copy.deepcopy(rnn).requires_grad_(False).to(dtype)
        flatten_bf16(self._copy)

    @property
    def weights(self) -> list[Tensor]:
        """The weights of the module itself."""
        return self.rnn._flat_weights  # type: ignore[return-value]

    @property
    def copies(self) -> list[Tensor]:
        """The weights of the copy."""
        return self._copy._flat_weights  # type: ignore[return-value]

    def update(self) -> None:
        """Cast the weights again; the gradients of earlier steps are discarded."""
        with torch.no_grad():
            copy_all(self.copies, self.weights)
        self._sums = None
        self.is_last_backward = False

    def __call__(self, x: Any, state: Any) -> Any:  # noqa: ANN401
        """Run the module on an input and a state of its dtype."""
        parameters = self._copy._flat_weights
        self._copy._flat_weights = list(_Cast.apply(self, parameters, *self.weights))  # type: ignore[no-untyped-call]
        try:
            return self._copy.train(self.rnn.training)(x, state)
        finally:
            self._copy._flat_weights = parameters

    def add_gradients(self, gradients: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return the gradients in the weights' dtype in the last backward; before it, add them to the sums."""
        converted = [
            torch.empty_like(gradient, dtype=weight.dtype)
            for gradient, weight in zip(gradients, self.weights, strict=True)
        ]
        copy_all(converted, gradients)
        if self.is_last_backward:
            return converted
        if self._sums is None:
            self._sums = converted
        else:
            add_all(self._sums, converted)
        return [None] * len(converted)

    def take_sums(self) -> Sequence[Tensor | None]:
        """Return the gradients that earlier backwards have summed, which are then forgotten."""
        sums, self._sums = self._sums, None
        return sums or [None] * len(self.weights)


_casts: dict[nn.RNNBase, CastRnn] = {}  # of the steps that run now


def find_cast(rnn: nn.RNNBase, dtype: torch.dtype) -> CastRnn:
    """Return the copy for the step that runs now; outside a step, a new one."""
    cast = _casts.get(rnn)
    return cast if cast is not None and cast.dtype == dtype else CastRnn(rnn, dtype)


def rnn_modules(module: nn.Module) -> list[nn.RNNBase]:
    """Return torch's RNN modules in `module`."""
    return [part for part in module.modules() if isinstance(part, nn.RNNBase)]


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call of `module` calls more than its `forward`."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def is_plain(rnn: nn.RNNBase) -> bool:
    """Return whether `rnn` is one of torch's own classes, without hooks and parametrizations."""
    # In a shared Stack, parameters are replaced by tensors that autograd has made.
    has_parameters = all(isinstance(rnn._parameters.get(name), nn.Parameter) for name in rnn._flat_weights_names)
    return type(rnn) in (nn.LSTM, nn.GRU) and has_parameters and not has_hooks(rnn)


class CastWeights:
    """The copies of RNN modules. If `dtype` is None, there are none."""

    def __init__(self, rnns: Sequence[nn.RNNBase], dtype: torch.dtype | None) -> None:
        self._rnns = rnns
        self._dtype = dtype

    @cached_property
    def _cast_rnns(self) -> list[CastRnn]:
        """Created when the first step needs it."""
        return [] if self._dtype is None else [CastRnn(rnn, self._dtype) for rnn in self._rnns if is_plain(rnn)]

    @property
    def copies(self) -> list[Tensor]:
        """The weights in `dtype`."""
        return [weight for cast in self._cast_rnns for weight in cast.copies]

    @contextmanager
    def for_step(self) -> Iterator[None]:
        """Cast the weights, and use these copies within the context."""
        try:
            for cast in self._cast_rnns:
                cast.update()
                _casts[cast.rnn] = cast
            yield
        finally:
            for cast in self._cast_rnns:
                _casts.pop(cast.rnn, None)

    def roots_of_last_backward(self) -> list[Tensor]:
        """Return one more root for the step's last backward, which hands the summed gradients to the weights."""
        casts = [cast for cast in self._cast_rnns if any(weight.requires_grad for weight in cast.weights)]
        for cast in casts:
            cast.is_last_backward = True
        weights = [weight for cast in casts for weight in cast.weights]
        return [_SummedGradients.apply(casts, *weights)] if weights else []  # type: ignore[no-untyped-call]


class _Cast(torch.autograd.Function):
    """Returns the copies for a call; the gradients of the call go to `CastRnn.add_gradients`."""

    @staticmethod
    def forward(ctx: Any, cast: CastRnn, copies: Sequence[Tensor], *weights: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        ctx.cast = cast
        return tuple(tensor.detach() for tensor in copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        return (None, None, *ctx.cast.add_gradients(gradients))


class _SummedGradients(torch.autograd.Function):
    """A zero whose backward gives the weights the gradients that were summed before the last backward."""

    @staticmethod
    def forward(ctx: Any, casts: Sequence[CastRnn], *weights: Tensor) -> Tensor:  # noqa: ANN401
        ctx.casts = casts
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        return (None, *(gradient for cast in ctx.casts for gradient in cast.take_sums()))
