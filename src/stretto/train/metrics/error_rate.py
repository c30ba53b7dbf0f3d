"""ErrorRate: how many words or characters of a transcript are wrong, as counts that are summed over rows and ranks."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ErrorRate:
    """Edits that turn predictions into targets, over the length of the targets. Add the rates of rows with `+`."""

    num_edits: int = 0  # insertions, deletions and substitutions
    num_targets: int = 0  # words, characters or labels of the targets

    @classmethod
    def of(cls, predicted: Sequence[Hashable], target: Sequence[Hashable]) -> "ErrorRate":
        """Return the error rate of one row's labels; of characters, if both are text."""
        return cls(edit_distance(predicted, target), len(target))

    @classmethod
    def of_words(cls, predicted: str, target: str) -> "ErrorRate":
        """Return the word error rate of one row; words are separated by white space."""
        return cls.of(predicted.split(), target.split())

    def __add__(self, other: "ErrorRate") -> "ErrorRate":
        return ErrorRate(self.num_edits + other.num_edits, self.num_targets + other.num_targets)

    @property
    def rate(self) -> float:
        """The fraction of wrong words, characters or labels, which may exceed 1; NaN if the targets are empty."""
        return self.num_edits / self.num_targets if self.num_targets else math.nan


def edit_distance(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Return the Levenshtein distance: the fewest insertions, deletions and substitutions between two sequences."""
    # One row of the table at a time: the distances from the beginning of `first` to each beginning of `second`.
    distances = list(range(len(second) + 1))
    for index, item in enumerate(first, 1):
        diagonal, distances[0] = distances[0], index
        for column, other in enumerate(second, 1):
            substitute = diagonal + (item != other)
            diagonal = distances[column]
            distances[column] = min(substitute, diagonal + 1, distances[column - 1] + 1)
    return distances[-1]
