"""Task: what kind of inputs and targets a dataset has, and how many features a network needs for them."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Task:
    """The kind and size of a dataset's inputs and targets; they determine a model's first and last block and loss."""

    inputs: Literal["tokens", "channels"]
    num_inputs: int  # the vocabulary's size, or the number of channels (twice that with `data.masks`)
    targets: Literal["tokens", "labels", "values"]  # a token per time step, a label per row, or numbers per time step
    num_outputs: int  # features of the last block: the vocabulary's size, or the number of classes or values

    @classmethod
    def language(cls, num_tokens: int) -> "Task":
        """Return the task of a language model: predict the next token. `num_tokens` is the vocabulary's size."""
        return cls("tokens", num_tokens, "tokens", num_tokens)
