"""Standardize: its mean and std are copied to a device once, not in every call."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.nn import Standardize


class OperatorNames(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the names of the operators that run in the context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_second_call_copies_nothing_to_the_device() -> None:
    block, x = Standardize([1.0, 2.0], [2.0, 4.0]), torch.ones(3, 1, 2)
    block(x, ())
    with OperatorNames() as operators:
        y, _ = block(x, ())
    assert operators.names == ["isnan", "sub", "div", "masked_fill"]
    assert y[0, 0].tolist() == [0.0, -0.25]


def test_gradients_flow_after_a_first_call_in_inference_mode() -> None:
    block, x = Standardize([1.0], [2.0]), torch.ones(3, 1, 1, requires_grad=True)
    with torch.inference_mode():
        block(x, ())
    (gradient,) = torch.autograd.grad(block(x, ())[0].sum(), [x])
    assert gradient.flatten().tolist() == [0.5] * 3
