"""ClassTable: precision, recall, F1 and support of each class, and the counts that they follow from."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ClassScores:
    """The scores of one class. A precision or recall without predictions or targets is 0."""

    name: str
    num_correct: int  # targets of this class that were predicted
    num_predicted: int
    support: int  # the number of targets of this class

    @property
    def precision(self) -> float:
        return self.num_correct / self.num_predicted if self.num_predicted else 0.0

    @property
    def recall(self) -> float:
        return self.num_correct / self.support if self.support else 0.0

    @property
    def f1(self) -> float:
        total = self.num_predicted + self.support
        return 2 * self.num_correct / total if total else 0.0

    @property
    def occurs(self) -> bool:
        """Whether the class is a target or a prediction."""
        return self.num_predicted + self.support > 0


@dataclass(frozen=True)
class ClassTable:
    """The scores of all classes, in their order."""

    classes: tuple[ClassScores, ...]

    @classmethod
    def of(cls, sums: Sequence[float], names: Sequence[str] = ()) -> "ClassTable":
        """Return the table from the sums of `ClassMetric`; without names, classes are called 0, 1, ..."""
        size = len(sums) // 3
        counts = [[int(value) for value in sums[start : start + size]] for start in (0, size, 2 * size)]
        names = names or [str(index) for index in range(size)]
        return cls(tuple(ClassScores(*row) for row in zip(names, *counts, strict=True)))

    def __iter__(self) -> Iterator[ClassScores]:
        return iter(self.classes)

    def __len__(self) -> int:
        return len(self.classes)

    def __str__(self) -> str:
        width = max(len("class"), *(len(row.name) for row in self)) if self.classes else len("class")
        lines = [f"{'class':{width}}  precision  recall      F1  support"]
        for row in self:
            lines.append(
                f"{row.name:{width}}  {row.precision:9.4f}  {row.recall:6.4f}  {row.f1:6.4f}  {row.support:7,}"
            )
        return "\n".join(lines)

    @property
    def accuracy(self) -> float:
        """The fraction of targets that were predicted; NaN without targets."""
        num_targets = sum(row.support for row in self)
        return sum(row.num_correct for row in self) / num_targets if num_targets else math.nan

    @property
    def macro_f1(self) -> float:
        """The mean F1 of the classes that occur, as a target or as a prediction; NaN if none does."""
        scores = [row.f1 for row in self if row.occurs]
        return sum(scores) / len(scores) if scores else math.nan

    def as_dict(self) -> Mapping[str, Mapping[str, float]]:
        """Return the scores by class and name, for the log."""
        return {
            row.name: {"precision": row.precision, "recall": row.recall, "f1": row.f1, "support": row.support}
            for row in self
        }
