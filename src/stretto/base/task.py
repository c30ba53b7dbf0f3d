"""Task: what kind of inputs and targets a dataset has, and how many features a network needs for them."""

from dataclasses import dataclass, field
from typing import Literal, get_args

TargetKind = Literal[
    "next_token", "class_per_row", "values_per_row", "class_per_step", "values_per_step", "sequence_per_row", "horizon"
]
"""What a model predicts: the next token; one class, or one or more values, per row or per time step; or the future.

`sequence_per_row` stands for a sequence of classes per row, with a length of its own, such as what was said in a
recording: class 0 is the blank of CTC and never a target. `horizon` stands for the values of some channels over the
next time steps.
"""
TARGET_KINDS: tuple[TargetKind, ...] = get_args(TargetKind)
# Those that come with the data; next tokens and horizons follow from the inputs.
GIVEN_TARGET_KINDS = tuple(kind for kind in TARGET_KINDS if kind not in ("next_token", "horizon"))
# Those of tables and series, in which each record is a time step.
TABLE_TARGET_KINDS = tuple(kind for kind in GIVEN_TARGET_KINDS if kind != "sequence_per_row")


IGNORE_INDEX = -100
"""Marks a time step without a target; torch's default `ignore_index`."""


MAX_CATEGORIES = 1000
"""A text input has at most this many different texts."""


@dataclass(frozen=True)
class CategoryInputs:
    """The inputs that hold the code of a category: 0 if it is missing or unknown, else 1 plus the index of its name."""

    num_names: int
    inputs: tuple[int, ...]  # indices: one or, if its future is known, one more for each time step of the horizon


@dataclass(frozen=True)
class Task:
    """The kind and size of a dataset's inputs and targets; they determine a model's first and last block and loss."""

    inputs: Literal["tokens", "channels"]
    num_inputs: int  # the vocabulary's size, or the number of channels (twice that with `data.masks`)
    targets: TargetKind
    num_outputs: int  # features of the last block: the vocabulary's size, or the number of classes or values
    categories: tuple[CategoryInputs, ...] = field(default=(), repr=False)  # inputs that are codes; others are numbers

    def __post_init__(self) -> None:
        if self.targets not in TARGET_KINDS:
            raise ValueError(f"targets={self.targets!r} is not known; choose from {', '.join(TARGET_KINDS)}")

    @classmethod
    def language(cls, num_tokens: int) -> "Task":
        """Return the task of a language model: predict the next token. `num_tokens` is the vocabulary's size."""
        return cls("tokens", num_tokens, "next_token", num_tokens)

    @property
    def has_classes(self) -> bool:
        """Whether targets are classes (tokens are classes too), and not values."""
        return has_classes(self.targets)

    @property
    def is_per_row(self) -> bool:
        """Whether a row has one target, at its last time step."""
        return is_per_row(self.targets)


def has_classes(kind: TargetKind) -> bool:
    """Whether targets of this kind are classes (tokens are classes too), and not values."""
    return kind in ("next_token", "class_per_row", "class_per_step", "sequence_per_row")


def is_per_row(kind: TargetKind) -> bool:
    """Whether a row has one target of this kind, at its last time step."""
    return kind in ("class_per_row", "values_per_row")


def is_per_step(kind: TargetKind) -> bool:
    """Whether every time step of a row has a target of its own, given with the data."""
    return kind in ("class_per_step", "values_per_step")


def has_own_length(kind: TargetKind) -> bool:
    """Whether targets of this kind are not at time steps, but have a length of their own in each row."""
    return kind == "sequence_per_row"


def target_name(kind: TargetKind) -> str:
    """Return what targets of this kind are called when they are counted: tokens, symbols, labels or values."""
    if has_own_length(kind):
        return "symbols"
    return "tokens" if kind == "next_token" else "labels" if has_classes(kind) else "values"
