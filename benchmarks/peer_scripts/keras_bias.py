"""The biases of Keras's LSTM: one per gate, where torch has two, whose sum counts."""

from collections.abc import Sequence
from typing import Any


def double_lstm_biases(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Return gradients with which a bias changes as much in a step as the sum of torch's two."""
    return [
        2 * gradient if "lstm" in variable.path and variable.path.endswith("bias") else gradient
        for gradient, variable in zip(gradients, variables, strict=True)
    ]
