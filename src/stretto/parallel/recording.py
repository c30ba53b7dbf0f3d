"""Recording: what the submodules of a module return in one step of a float64 copy."""

import copy
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from stretto.base.errors import ConfigError
from stretto.base.trees import map_tensors, tensors_of
from stretto.parallel.stack import Stack

TOLERANCE = 1e-9  # sums in another order differ by about 1e-15 in float64, mistakes by much more
WHOLE = "the module's own forward"  # in place of a submodule's name
LossFunction = Callable[[Any, Any], Any]
Calls = list[tuple[str, list[Tensor]]]  # of submodules: name and outputs, in the order in which they return


def copy_in_float64(module: nn.Module) -> nn.Module:
    """Return a plain copy without gradients; its recurrent layers are in training mode, and without dropout."""
    plain = copy.deepcopy(module).double()
    plain.zero_grad()
    for child in plain.modules():
        if isinstance(child, nn.RNNBase):
            child.training, child.dropout = True, 0.0
            child.register_forward_hook(_make_contiguous)
        elif isinstance(child, Stack):
            child.training = True  # its blocks keep their mode
    return plain


def _make_contiguous(_rnn: nn.Module, _inputs: Any, output: Any) -> Any:  # noqa: ANN401
    """Return the output in one order in memory, because torch draws the masks of a later nn.Dropout in that order."""
    y, state = output
    return y.contiguous() if isinstance(y, Tensor) else y, state


def record_step(module: nn.Module, batch: Any, loss: LossFunction) -> tuple[Calls, Tensor]:  # noqa: ANN401
    """Compute the loss and the gradients of a copy; return its calls, and the loss."""
    with torch.enable_grad(), _same_random_numbers(module):
        calls, value = _record(module, batch, loss)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            raise ConfigError("loss(module, batch) has to return a scalar tensor that depends on the module's weights")
        if value.dtype != torch.float64 or not value.isfinite():
            raise ConfigError(f"the loss is {float(value)} in {value.dtype}; it has to be finite and in torch.float64")
        value.backward()  # type: ignore[no-untyped-call]
    return calls, value.detach()


def compare(actual: Calls, expected: Calls) -> tuple[float, str, float]:
    """Return place and name of the first call that differs, and the largest difference of all."""
    place, first, largest = math.inf, "", 0.0
    missing: tuple[str, list[Tensor]] = ("", [])
    for index, (one, other) in enumerate(zip_longest(actual, expected, fillvalue=missing)):
        is_alike = one[0] == other[0] and len(one[1]) == len(other[1])
        distance = max(map(difference, one[1], other[1]), default=0.0) if is_alike else math.inf
        if distance > TOLERANCE and not first:
            place, first = index, other[0] or one[0]
        largest = max(largest, distance)
    return place, first, largest


def difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value if that exceeds 1."""
    if actual.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    actual, expected = actual.double(), expected.double()
    is_same = (actual == expected) | (actual.isnan() & expected.isnan())
    largest = (actual - expected).abs().masked_fill(is_same, 0.0).max()
    return float((largest / expected.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp(min=1)).nan_to_num(math.inf))


def _record(module: nn.Module, batch: Any, loss: LossFunction) -> tuple[Calls, Any]:  # noqa: ANN401
    """Compute the loss; return what each submodule returns, those inside another before it, and the loss."""
    calls: Calls = []

    def hook_of(name: str) -> Callable[..., None]:
        return lambda _child, _inputs, output: calls.append((name, [each.detach() for each in tensors_of(output)]))

    # What is inside a Stack is called chunk by chunk.
    inner = {
        each for stack in module.modules() if isinstance(stack, Stack) for each in stack.modules() if each != stack
    }
    named = [(name, child) for name, child in module.named_modules() if child not in inner]
    hooks = [child.register_forward_hook(hook_of(name or WHOLE)) for name, child in named]
    value = loss(module, map_tensors(_double, batch))
    for hook in hooks:
        hook.remove()
    return calls, value


@contextmanager
def _same_random_numbers(module: nn.Module) -> Iterator[None]:
    """Compute in float64 with the random numbers that come next, which afterwards still come next."""
    device, python, dtype = next(module.parameters()).device, random.getstate(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of zeros that a forward makes
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        torch.set_default_dtype(dtype)


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True)
