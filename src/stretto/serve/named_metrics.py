"""compute_named_metrics: the metrics of a run's `metrics.names`, from a predictions file."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.base.metric_names import ENTITY_F1, PER_CLASS
from stretto.train.metrics.class_table import ClassScores, ClassTable
from stretto.train.metrics.entities import EntityCounts
from stretto.train.metrics.error_rate import ErrorRate

# The others that have names are among those of `compute_metrics`, or need the model's outputs.
_NAMES = ("f1", PER_CLASS, ENTITY_F1, "character_error_rate")


def compute_named_metrics(
    path: Path | str, names: Sequence[str], class_names: Sequence[str] = ()
) -> dict[str, float | ClassTable]:
    """Return those of the built-in metrics `names` that `compute_metrics` does not, if the true targets are known.

    They are the same as those of an evaluation. `class_names` gives the order of a class table.
    """
    wanted = [name for name in names if name in _NAMES]
    if not wanted:
        return {}
    counts = _Counts(has_entities=ENTITY_F1 in wanted)
    with Path(path).open(encoding="utf-8") as lines:
        for line in lines:
            counts.add(json.loads(line))
    results = counts.results(class_names)
    return {name: results[name] for name in wanted if name in results}


@dataclass
class _Counts:
    """What the metrics are computed from."""

    has_entities: bool
    num_correct: Counter[str] = field(default_factory=Counter)
    num_predicted: Counter[str] = field(default_factory=Counter)
    support: Counter[str] = field(default_factory=Counter)
    entities: EntityCounts = field(default_factory=EntityCounts)
    characters: ErrorRate = field(default_factory=ErrorRate)

    def add(self, result: Mapping[str, Any]) -> None:
        """Count one row."""
        if "true_label" in result:
            self._count(result["label"], result["true_label"])
        if "true_labels" in result:
            # Time steps without a target are outside of entities.
            pairs = list(zip(result["labels"], result["true_labels"], strict=True))
            known = [("O", "O") if true_label is None else (label, true_label) for label, true_label in pairs]
            for label, true_label in pairs:
                if true_label is not None:
                    self._count(label, true_label)
            if self.has_entities:
                self.entities += EntityCounts.of([label for label, _ in known], [true_label for _, true_label in known])
        if "true_text" in result:
            self.characters += ErrorRate.of(result["text"], result["true_text"])

    def _count(self, label: str, true_label: str) -> None:
        self.num_predicted[label] += 1
        self.support[true_label] += 1
        self.num_correct[label] += label == true_label

    def results(self, class_names: Sequence[str]) -> dict[str, float | ClassTable]:
        """Return the metrics that the rows have targets for."""
        results: dict[str, float | ClassTable] = {}
        if self.support:
            names = class_names or sorted({*self.support, *self.num_predicted})
            table = ClassTable(
                tuple(
                    ClassScores(name, self.num_correct[name], self.num_predicted[name], self.support[name])
                    for name in names
                )
            )
            results |= {"f1": table.macro_f1, PER_CLASS: table}
            if self.has_entities:
                results[ENTITY_F1] = self.entities.f1
        if self.characters.num_targets:
            results["character_error_rate"] = self.characters.rate
        return results
