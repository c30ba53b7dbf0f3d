"""Task: what goes into a network, and what is asked of it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Task:
    """What data asks of a network: enough to know its first and its last block, and its loss."""

    inputs: Literal["tokens", "channels"]
    num_inputs: int  # the vocabulary's size, or the number of channels
    targets: Literal["tokens", "labels", "values"]  # the token at each step, a label at the last, or numbers
    num_outputs: int

    @classmethod
    def language(cls, num_tokens: int) -> "Task":
        """Return the task of a language model: which token comes next?"""
        return cls("tokens", num_tokens, "tokens", num_tokens)
