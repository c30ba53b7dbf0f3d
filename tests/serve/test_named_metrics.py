"""Metrics by name from a predictions file, against those that are computed from its lines by hand."""

import json
from pathlib import Path

from pytest import approx

from stretto.serve.named_metrics import compute_named_metrics
from stretto.train.metrics.class_table import ClassTable

TAGGED: list[dict[str, object]] = [
    {"labels": ["B-LOC", "I-LOC", "B-PER", "B-PER"], "true_labels": ["B-LOC", "I-LOC", None, "O"]},
    {"labels": ["O", "B-PER"], "true_labels": ["B-LOC", "B-PER"]},
    {"labels": ["B-PER"]},  # its true tags are not known
]


def write(path: Path, lines: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_tags_that_are_missing_are_outside_of_entities_and_not_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*TAGGED])
    metrics = compute_named_metrics(path, ["entity_f1", "f1", "per_class", "mae", "my.py:own"], ["B-LOC", "I-LOC", "O"])
    # Of three predicted and three true entities, two are right.
    assert metrics["entity_f1"] == approx(4 / 6)
    table = metrics["per_class"]
    assert isinstance(table, ClassTable)
    counts = [(row.name, row.num_correct, row.num_predicted, row.support) for row in table]
    assert counts == [("B-LOC", 1, 1, 2), ("I-LOC", 1, 1, 1), ("O", 0, 1, 1)]
    assert metrics["f1"] == approx((2 / 3 + 1 + 0) / 3)
    assert list(metrics) == ["entity_f1", "f1", "per_class"]


def test_the_label_of_a_row_and_the_text_of_symbols_have_metrics_too(tmp_path: Path) -> None:
    labels = write(tmp_path / "a.jsonl", [{"label": "a", "true_label": "a"}, {"label": "a", "true_label": "b"}])
    assert compute_named_metrics(labels, ["f1"]) == {"f1": approx((2 / 3 + 0) / 2)}
    texts = write(tmp_path / "b.jsonl", [{"text": "ther", "true_text": "there"}, {"text": "a", "true_text": "a"}])
    assert compute_named_metrics(texts, ["character_error_rate"]) == {"character_error_rate": approx(1 / 6)}
    assert compute_named_metrics(texts, ["f1", "entity_f1"]) == {}
