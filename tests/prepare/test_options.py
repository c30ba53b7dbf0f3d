"""Options are checked when they are created, and a fingerprint depends on each of them."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from stretto.data import SequenceOptions, SeriesOptions, TextOptions, prepare_sequences
from stretto.errors import DataError
from stretto.prepare.options import PrepareOptions
from stretto.store.vocabulary import ByteVocabulary

VALUES: dict[str, Any] = {
    "bad_rows": "skip",
    "nan": "missing",
    "level": "word",
    "read_as": "tokens",
    "vocabulary": ByteVocabulary(),
    "tokenizer": "bpe:300",
    "columns": ("a", "b"),
    "inputs": ("a", "b"),
    "targets": ("a", "b"),
    "target_kind": "values_per_row",
    "validation_fraction": 0.5,
    "time_format": "%d.%m.%Y",
}


@pytest.mark.parametrize("options", [TextOptions(), SequenceOptions(), SeriesOptions()])
def test_every_option_changes_the_fingerprint(options: PrepareOptions, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"tokens": [1]}\n')
    prepare_sequences(tmp_path / "a.jsonl", tmp_path / "like")
    for item in fields(options):
        value = tmp_path / "like" if item.name == "like" else VALUES.get(item.name, 7)
        changed: PrepareOptions = type(options)(**{item.name: value})
        assert changed.to_dict() != options.to_dict(), item.name


def test_the_kinds_have_different_fingerprints() -> None:
    assert TextOptions().to_dict() != SequenceOptions().to_dict() != SeriesOptions().to_dict()


def test_other_data_counts_by_its_contents_not_by_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"tokens": [1]}\n')
    for name in ("one", "two"):
        prepare_sequences(tmp_path / "a.jsonl", tmp_path / name)
    one, two = (SequenceOptions(like=tmp_path / name).to_dict() for name in ("one", "two"))
    assert one == two


def test_a_value_that_no_kind_allows_is_an_error() -> None:
    with pytest.raises(DataError, match="level='bpe' is not allowed; choose from byte, char, word"):
        TextOptions(level="bpe")  # type: ignore[arg-type]
