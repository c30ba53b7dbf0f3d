"""Entities in tags such as B-PER and I-PER: found, counted, and scored as precision, recall and F1 per type."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from stretto.train.metrics.class_table import ClassScores, ClassTable

Entity = tuple[str, int, int]  # its type, its first time step, and the one after its last


@dataclass(frozen=True)
class EntityCounts:
    """How many entities of each type are correct, predicted and targets. Add the counts of rows with `+`.

    An entity is correct if its type, its beginning and its end are.
    """

    correct: Counter[str] = field(default_factory=Counter)
    predicted: Counter[str] = field(default_factory=Counter)
    targets: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, predicted: Sequence[str], target: Sequence[str]) -> "EntityCounts":
        """Return the counts of one row, given its tags in the scheme BIO or BIOES."""
        found, expected = find_entities(predicted), find_entities(target)
        both = set(found) & set(expected)
        return cls(*(Counter(kind for kind, _, _ in entities) for entities in (both, found, expected)))

    def __add__(self, other: "EntityCounts") -> "EntityCounts":
        return EntityCounts(
            self.correct + other.correct, self.predicted + other.predicted, self.targets + other.targets
        )

    @property
    def table(self) -> ClassTable:
        """Precision, recall, F1 and support of each type."""
        types = sorted({*self.predicted, *self.targets})
        return ClassTable(
            tuple(ClassScores(kind, self.correct[kind], self.predicted[kind], self.targets[kind]) for kind in types)
        )

    @property
    def f1(self) -> float:
        """The F1 of all entities, whatever their type (micro); 0 if there are none."""
        total = self.predicted.total() + self.targets.total()
        return 2 * self.correct.total() / total if total else 0.0


def find_entities(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of a row, in order.

    Tags are `O`, or a prefix and a type: `B-` begins an entity, `I-` continues one, `E-` ends one, and `S-` is one by
    itself. Where tags contradict each other, as an `I-` after `O` or after another type, an entity begins.
    """
    entities: list[Entity] = []
    kind, start = "", 0  # of the entity that is open; no type: none is
    is_closed = True
    for step, tag in enumerate([*tags, "O"]):
        prefix, _, tag_kind = tag.partition("-")
        is_outside = prefix == "O" or not tag
        begins = is_closed or prefix in ("B", "S") or tag_kind != kind
        if not is_closed and (is_outside or begins):
            entities.append((kind, start, step))
            is_closed = True
        if not is_outside and begins:
            kind, start, is_closed = tag_kind, step, False
        if not is_closed and prefix in ("E", "S"):
            entities.append((kind, start, step + 1))
            is_closed = True
    return entities
