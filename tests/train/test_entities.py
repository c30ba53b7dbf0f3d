"""Entities in BIO and BIOES tags, and their F1 as a sum over rows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.train import EntityCounts, find_entities

CASES = {
    "bio": ("B-PER I-PER O B-LOC", [("PER", 0, 2), ("LOC", 3, 4)]),
    "two in a row": ("B-PER B-PER I-PER", [("PER", 0, 1), ("PER", 1, 3)]),
    "inside without a beginning": ("O I-PER I-PER", [("PER", 1, 3)]),
    "another type inside": ("B-PER I-LOC I-LOC", [("PER", 0, 1), ("LOC", 1, 3)]),
    "bioes": ("S-PER B-LOC I-LOC E-LOC O S-PER S-PER", [("PER", 0, 1), ("LOC", 1, 4), ("PER", 5, 6), ("PER", 6, 7)]),
    "inside after an end": ("B-LOC E-LOC I-LOC", [("LOC", 0, 2), ("LOC", 2, 3)]),
    "an end alone": ("O E-LOC O", [("LOC", 1, 2)]),
    "a type with a dash": ("B-a-b I-a-b I-a", [("a-b", 0, 2), ("a", 2, 3)]),
    "none": ("O O", []),
    "empty": ("", []),
}


@pytest.mark.parametrize(("tags", "entities"), CASES.values(), ids=CASES.keys())
def test_entities_are_found(tags: str, entities: list[tuple[str, int, int]]) -> None:
    assert find_entities(tags.split()) == entities


def test_f1_counts_entities_that_are_right_in_type_and_both_ends() -> None:
    target = ["B-PER", "I-PER", "O", "B-LOC", "O", "B-LOC"]
    predicted = ["B-PER", "I-PER", "O", "B-PER", "O", "B-LOC"]
    counts = EntityCounts.of(predicted, target)
    person, location = sorted(counts.table, key=lambda row: row.name != "PER")
    assert (person.precision, person.recall, person.support) == (0.5, 1.0, 1)
    assert (location.precision, location.recall, location.support) == (1.0, 0.5, 2)
    assert counts.f1 == pytest.approx(2 * 2 / (3 + 3))
    assert EntityCounts.of(["O"], ["O"]).f1 == 0.0


kinds = st.sampled_from(["O", "B-a", "I-a", "E-a", "S-a", "B-b", "I-b"])


@given(st.lists(st.lists(kinds, min_size=3, max_size=5), min_size=2, max_size=4), st.data())
def test_rows_may_be_counted_in_any_parts(targets: list[list[str]], data: st.DataObject) -> None:
    predicted = [data.draw(st.lists(kinds, min_size=len(row), max_size=len(row))) for row in targets]
    parts = [EntityCounts.of(*row) for row in zip(predicted, targets, strict=True)]
    # With an O between them, the rows are one row.
    joined = [tag for row in predicted for tag in (*row, "O")], [tag for row in targets for tag in (*row, "O")]
    assert sum(parts[1:], parts[0]) == EntityCounts.of(*joined)
    assert EntityCounts.of(targets[0], targets[0]).f1 in (0.0, 1.0)
