"""`tokenizer=bpe:300`: the same tokens from any cut of the text, bounded training, and options that fit together."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.data import SequenceOptions, TextOptions, prepare_sequences, prepare_text
from stretto.errors import DataError
from stretto.prepare import text_files as text_module
from stretto.prepare import tokenizer as tokenizer_module
from stretto.prepare.prepare_job import Progress

pytest.importorskip("tokenizers")


def test_a_corpus_of_subwords_decodes_to_its_text_with_its_bytes(text_file: Path, tmp_path: Path) -> None:
    (corpus,) = prepare_text(text_file, tmp_path / "out", TextOptions(tokenizer="bpe:300"))
    assert corpus.vocabulary.level == "subword" and 256 < len(corpus.vocabulary) <= 300
    assert corpus.vocabulary.decode(corpus.read(0, corpus.num_tokens)) == text_file.read_text(encoding="utf-8")
    assert corpus.num_bytes == text_file.stat().st_size > 3 * corpus.num_tokens
    assert corpus.num_unknown == 0


def test_cuts_and_workers_change_nothing(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = prepare_text(text_file, tmp_path / "one", TextOptions(tokenizer="bpe:300"))
    options = TextOptions(tokenizer="bpe:300", shard_bytes=3001)
    (two,) = prepare_text(text_file, tmp_path / "two", options, workers=2)
    monkeypatch.setattr(text_module, "_READ_BYTES", 37)  # less than a line
    (many,) = prepare_text(text_file, tmp_path / "many", options, workers=1)
    assert len(one.fields.shards) == 1 < 4 <= len(two.fields.shards)
    assert one.vocabulary == two.vocabulary == many.vocabulary
    for other in (two, many):
        assert np.array_equal(one.read(0, one.num_tokens), other.read(0, other.num_tokens))


def test_validation_text_does_not_train_the_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("aaaa bbbb\n" * 85 + "cccc dddd\n" * 15)
    train, valid = prepare_text(path, tmp_path / "out", TextOptions(tokenizer="bpe:300", validation_fraction=0.2))
    assert train.vocabulary == valid.vocabulary
    assert len(train.vocabulary.encode("aaaa bbbb\n")) == 3 and len(train.vocabulary.encode("cccc dddd\n")) == 10


def test_progress_and_a_resumed_preparation_does_not_train_again(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Progress] = []
    size = text_file.stat().st_size

    def interrupt(progress: Progress) -> None:
        seen.append(progress)
        if progress.phase.startswith("writing"):
            raise KeyboardInterrupt

    monkeypatch.setattr(text_module, "_READ_BYTES", 2000)
    with pytest.raises(KeyboardInterrupt):
        prepare_text(text_file, tmp_path / "out", TextOptions(tokenizer="bpe:300"), on_progress=interrupt)
    training = [progress.done for progress in seen if progress.phase == "training 300 subwords"]
    assert len(training) > 5 and training == sorted(training) and training[-1] == size
    monkeypatch.setattr(tokenizer_module, "train_bpe", None)
    (corpus,) = prepare_text(text_file, tmp_path / "out", TextOptions(tokenizer="bpe:300"))
    assert corpus.num_tokens


def test_a_large_text_trains_on_the_beginnings_of_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{letter * 8}\n" * 100 for letter in "abcdefghij"))
    monkeypatch.setattr(tokenizer_module, "_MAX_TRAINING_BYTES", 500)
    monkeypatch.setattr(tokenizer_module, "_MAX_TRAINING_PARTS", 5)
    monkeypatch.setattr(text_module, "_READ_BYTES", 50)
    monkeypatch.setattr("stretto.prepare.prepare_text._COUNTED_BYTES", 900)
    (corpus,) = prepare_text(path, tmp_path / "out", TextOptions(tokenizer="bpe:300", shard_bytes=900), workers=1)
    lengths = [len(corpus.vocabulary.encode(letter * 8)) for letter in "abcdefghij"]
    assert lengths == [1, 8] * 5


def test_a_text_of_many_small_parts_trains_on_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{letter * 8}\n" * 100 for letter in "abcdefghij"))
    monkeypatch.setattr(tokenizer_module, "_MAX_TRAINING_PARTS", 5)
    (one,) = prepare_text(path, tmp_path / "one", TextOptions(tokenizer="bpe:300"), workers=1)
    monkeypatch.setattr("stretto.prepare.prepare_text._COUNTED_BYTES", 900)
    (many,) = prepare_text(path, tmp_path / "many", TextOptions(tokenizer="bpe:300", shard_bytes=900), workers=1)
    assert len(many.fields.shards) == 10 and one.vocabulary == many.vocabulary


def test_text_that_is_not_utf8_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"good\nb\xffd\n")
    with pytest.raises(DataError, match=r"byte 7 is not UTF-8; convert the file, or use level=byte"):
        prepare_text(path, tmp_path / "out", TextOptions(tokenizer="bpe:300"))


def test_a_tokenizer_file_is_used_as_it_is(text_file: Path, tmp_path: Path) -> None:
    (first,) = prepare_text(text_file, tmp_path / "first", TextOptions(tokenizer="bpe:300"))
    saved = json.loads((tmp_path / "first" / "vocabulary.json").read_text(encoding="utf-8"))["tokenizer"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    options = TextOptions(tokenizer=tmp_path / "tokenizer.json")
    (second,) = prepare_text(text_file, tmp_path / "second", options)
    (third,) = prepare_text(text_file, tmp_path / "third", TextOptions(vocabulary=tmp_path / "first"))
    assert first.vocabulary == second.vocabulary == third.vocabulary
    assert first.fields == second.fields == third.fields
    # The tokenizer counts by its content, not by its place.
    (tmp_path / "copy.json").write_text(json.dumps(saved))
    assert options.to_dict() == TextOptions(tokenizer=tmp_path / "copy.json").to_dict()
    saved["model"]["merges"].pop()
    (tmp_path / "copy.json").write_text(json.dumps(saved))
    assert options.to_dict() != TextOptions(tokenizer=tmp_path / "copy.json").to_dict()


def test_records_of_text_become_subwords(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"text": f"the theme\nenters {'twice' if n % 2 else 'once'}", "n": n % 2} for n in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)))
    options = SequenceOptions(tokenizer="bpe:300", label="n", validation_fraction=0.25)
    train, valid = prepare_sequences(path, tmp_path / "out", options)
    assert train.vocabulary is not None and train.vocabulary == valid.vocabulary
    assert train.vocabulary.level == "subword" and train.longest < 8
    (like,) = prepare_sequences(path, tmp_path / "like", SequenceOptions(like=tmp_path / "out" / "train", label="n"))
    assert like.vocabulary == train.vocabulary
    whole = SequenceOptions(tokenizer="bpe:300", label="n")
    (one,) = prepare_sequences(path, tmp_path / "one", whole)
    cut = SequenceOptions(tokenizer="bpe:300", label="n", shard_bytes=200)
    (many,) = prepare_sequences(path, tmp_path / "many", cut, workers=2)
    assert one.vocabulary == many.vocabulary and one.num_steps == many.num_steps
    assert len(many.shard_sizes) > 1


def test_a_text_without_tokens_is_a_bad_row(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "theme": 1, "[UNK]": 2}, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "my.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "the theme"}\n{"text": "  "}\n{"text": "theme"}\n')
    message = "row 2: the tokenizer finds no token in the text; use a different tokenizer, or skip such rows with"
    with pytest.raises(DataError, match=message):
        prepare_sequences(tmp_path / "a.jsonl", tmp_path / "a", SequenceOptions(tokenizer=tmp_path / "my.json"))
    options = SequenceOptions(tokenizer=tmp_path / "my.json", bad_rows="skip")
    (store,) = prepare_sequences(tmp_path / "a.jsonl", tmp_path / "b", options, on_skipped=lambda skipped: None)
    assert store.num_sequences == 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no size": ({"tokenizer": "bpe"}, "tokenizer=bpe has no size from 257 to 1,000,000; use a size such as bpe:8000"),
    "too small": ({"tokenizer": "bpe:256"}, "tokenizer=bpe:256 has no size from 257"),
    "no file": ({"tokenizer": "my.json"}, "tokenizer=my.json is not a file; use bpe:SIZE, or the path of a tokenizer"),
    "level": ({"tokenizer": "bpe:300", "level": "word"}, "tokenizer=bpe:300 and level=word contradict each other"),
    "symbols": ({"tokenizer": "bpe:300", "max_symbols": 9}, "tokenizer=bpe:300 and max_symbols=9 contradict each"),
    "subword": ({"level": "subword"}, "level='subword' is not allowed; choose from byte, char, word"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_contradictions_are_refused(options: dict[str, Any], message: str, text_file: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        prepare_text(text_file, tmp_path / "out", TextOptions(**options))
    assert not (tmp_path / "out.partial").exists()


def test_subwords_have_no_targets_per_time_step(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "a b", "tags": ["x", "y"]}))
    options = SequenceOptions(tokenizer="bpe:300", targets="tags", target_kind="class_per_step")
    with pytest.raises(DataError, match=r"targets=tags has a target per time step, which a subword is not; use level"):
        prepare_sequences(path, tmp_path / "out", options)
