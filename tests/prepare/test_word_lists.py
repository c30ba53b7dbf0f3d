"""Lists of words in one field: a tagged corpus in its usual form is read as text, word by word."""

import json
from pathlib import Path
from typing import Any

import pytest

from stretto.data import (
    DataHints,
    SequenceOptions,
    Sequences,
    inspect_data,
    prepare_data,
    prepare_sequences,
)
from stretto.errors import DataError
from stretto.prepare.sequence_schema import SequenceSchema

SENTENCES = [
    (["in", "Rome", "in", "May"], ["O", "B-LOC", "O", "O"]),
    (["Anna", "sleeps"], ["B-PER", "O"]),
    (["near", "Rome", "."], ["O", "B-LOC", "O"]),
]


def jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def corpus(path: Path, field: str = "tokens", **others: object) -> Path:
    return jsonl(path, [{field: words, "tags": tags, **others} for words, tags in SENTENCES])


def prepare(source: object, out: Path, **options: object) -> Sequences:
    (store,) = prepare_sequences(source, out, SequenceOptions(**options))  # type: ignore[arg-type]
    return store


def rows_of(store: Sequences) -> list[list[int]]:
    rows = store.step_ranges([(0, index) for index in range(store.num_sequences)])
    return [row.tolist() for row in store.read(rows)]


@pytest.mark.parametrize("options", [{}, {"inputs": "tokens"}, {"sequence": "tokens", "level": "word"}], ids=str)
def test_a_list_of_words_is_read_like_the_text_of_these_words(options: dict[str, Any], tmp_path: Path) -> None:
    texts = [{"text": " ".join(words), "tags": tags} for words, tags in SENTENCES]
    expected = prepare(jsonl(tmp_path / "a.jsonl", texts), tmp_path / "text", targets="tags", level="word")
    store = prepare(corpus(tmp_path / "b.jsonl"), tmp_path / "words", targets="tags", **options)
    assert store.vocabulary == expected.vocabulary and rows_of(store) == rows_of(expected)
    assert store.fields.targets == expected.fields.targets
    assert store.fields.targets is not None and store.fields.targets.kind == "class_per_step"


def test_words_of_csv_and_of_dicts_are_read_too(tmp_path: Path) -> None:
    cells = [json.dumps(words).replace('"', '""') for words, _ in SENTENCES]
    (tmp_path / "a.csv").write_text("words,topic\n" + "".join(f'"{cell}",x\n' for cell in cells))
    from_csv = prepare(tmp_path / "a.csv", tmp_path / "csv", inputs="words", label="topic")
    records = ({"words": words, "topic": "x"} for words, _ in SENTENCES)
    from_dicts = prepare(records, tmp_path / "dicts", inputs="words", label="topic")
    assert from_csv.vocabulary == from_dicts.vocabulary and rows_of(from_csv) == rows_of(from_dicts)


def test_other_files_get_the_vocabulary_of_like_as_words_or_as_text(tmp_path: Path) -> None:
    store = prepare(corpus(tmp_path / "a.jsonl"), tmp_path / "train", targets="tags")
    new = [["Rome", "sleeps"], ["unseen"]]
    words = prepare(jsonl(tmp_path / "b.jsonl", [{"tokens": row} for row in new]), tmp_path / "b", like=store.location)
    texts = [{"text": " ".join(row)} for row in new]
    text = prepare(jsonl(tmp_path / "c.jsonl", texts), tmp_path / "c", like=store.location)
    assert words.vocabulary == text.vocabulary == store.vocabulary
    assert rows_of(words) == rows_of(text) and rows_of(words)[1] == [0]


def test_one_field_of_words_can_be_read_as_categories(tmp_path: Path) -> None:
    store = prepare(corpus(tmp_path / "a.jsonl"), tmp_path / "out", inputs="tokens", targets="tags", read_as="channels")
    assert store.fields.values.type == "channels" and "Rome" in store.fields.values.categories["tokens"]


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (["New York"], {}, "'tokens' has \"New York\", but a word is not empty and has no white space; replace white"),
        (["", "a"], {}, "'tokens' has \"\", but a word is not empty"),
        (["a", None], {"read_as": "text"}, "not text"),
        (["a"], {"level": "char"}, "lists of words, but a token is a char; use level=word, or join the words"),
        ([True, "a"], {"sequence": "tokens", "read_as": None}, "not an integer"),
        ([], {}, "'tokens' is an empty list"),
    ],
)
def test_what_is_not_a_word_is_refused(
    words: list[object], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        prepare(jsonl(tmp_path / "a.jsonl", [{"tokens": words}]), tmp_path / "out", **options)


def test_lists_that_are_neither_numbers_nor_words_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="join them with spaces into one text and use level=word"):
        prepare(jsonl(tmp_path / "a.jsonl", [{"inputs": [True, "a"]}]), tmp_path / "out")


@pytest.mark.parametrize(
    ("field", "others", "hints"),
    [
        ("tokens", {}, DataHints()),
        ("tokens", {"id": 7}, DataHints(targets=("tags",))),
        ("words", {"id": "a first sentence"}, DataHints()),
        ("sentence", {}, DataHints(targets=("tags",))),
        ("sentence", {"id": 7}, DataHints(inputs=("sentence",), targets=("tags",))),
    ],
)
def test_an_inspection_finds_the_words_and_their_tags(
    field: str, others: dict[str, object], hints: DataHints, tmp_path: Path
) -> None:
    inspection = inspect_data(corpus(tmp_path / "a.jsonl", field, **others), hints)
    schema = SequenceSchema(field, "text", "word", has_words=True, targets=("tags",), target_kind="class_per_step")
    assert inspection.schema == schema
    prepared = prepare_data(inspection, tmp_path / "data", validation_fraction=0.0)
    assert isinstance(prepared.train, Sequences) and rows_of(prepared.train)


def test_a_list_of_texts_beside_a_text_is_not_the_sequence(tmp_path: Path) -> None:
    records = [{"review": f"a fine place number {number}", "keywords": ["food", "view"]} for number in range(4)]
    schema = inspect_data(jsonl(tmp_path / "a.jsonl", records), DataHints(has_label=False)).schema
    assert isinstance(schema, SequenceSchema) and schema.sequence == "review" and not schema.has_words
