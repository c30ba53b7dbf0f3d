"""Compare tensors relative to the largest value."""

import torch
from torch import Tensor


def assert_equal(actual: Tensor, expected: Tensor, name: str, tolerance: float = 1e-9) -> None:
    """A different order of summation changes the last digits of the largest term. Integers must be the same."""
    assert actual.shape == expected.shape, name
    if not actual.is_floating_point():
        assert torch.equal(actual, expected), name
    elif actual.numel():
        difference = float((actual.double() - expected.double()).abs().max())
        assert difference <= tolerance * max(float(expected.double().abs().max()), 1e-3), f"{name}: {difference:.1e}"
