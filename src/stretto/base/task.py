"""Task: the inputs and targets of a network."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Task:
    """The inputs and targets of a dataset, which determine a network's first block, last block and loss."""

    inputs: Literal["tokens", "channels"]
    num_inputs: int  # the vocabulary's size, or the number of channels (with masks, twice that)
    targets: Literal["tokens", "labels", "values"]  # a token per time step, a label per row, or numbers per time step
    num_outputs: int  # features of the last block: the vocabulary's size, or the number of classes or values

    @classmethod
    def language(cls, num_tokens: int) -> "Task":
        """Return the task of a language model, to predict the next token; `num_tokens` is the vocabulary's size."""
        return cls("tokens", num_tokens, "tokens", num_tokens)
