import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from stretto.data import Corpus, Sequences, TextOptions, prepare_text
from stretto.errors import DataError
from stretto.store.file_writer import write_file
from stretto.store.index import Store, write_index
from stretto.store.pages import ByteArray, ByteRange
from stretto.store.vocabulary import SymbolVocabulary, vocabulary_bytes


def test_a_gather_is_one_request_for_all_its_rows(text_file: Path, tmp_path: Path) -> None:
    (corpus,) = prepare_text(text_file, tmp_path / "out", TextOptions(level="word", shard_bytes=700), workers=1)
    tokens = corpus.read(0, corpus.num_tokens)
    requests: list[int] = []
    pages = corpus.store.pages

    class Counted:
        def read(self, byte_ranges: Sequence[ByteRange]) -> list[ByteArray]:
            requests.append(len(byte_ranges))
            return pages.read(byte_ranges)

    store = Store(corpus.location, corpus.store.kind, corpus.store.fields, corpus.store.files, Counted(), "")
    starts = np.array([900, 0, 333, corpus.num_tokens - 500])
    gathered = Corpus(store, corpus.fields, corpus.vocabulary).gather(starts, 500)
    assert len(requests) == 1 and requests[0] > len(starts), "rows go across shards"
    assert np.array_equal(gathered, np.stack([tokens[start : start + 500] for start in starts]))


def test_a_gather_of_no_rows_or_no_steps_is_empty(byte_corpus: Corpus) -> None:
    assert byte_corpus.gather(np.array([3, 5]), 0).shape == (2, 0)
    assert byte_corpus.gather(np.array([], np.int64), 7).shape == (0, 7)


def test_a_corpus_is_pickled_without_its_tokens(byte_corpus: Corpus) -> None:
    byte_corpus.read(0, byte_corpus.num_tokens)
    again = pickle.loads(pickle.dumps(byte_corpus))  # noqa: S301 - our own
    assert len(pickle.dumps(byte_corpus)) < 3000 < byte_corpus.num_tokens
    assert (again.read(0, 50) == byte_corpus.read(0, 50)).all()


def test_a_token_beyond_the_vocabulary_is_refused_with_file_and_position(tmp_path: Path) -> None:
    vocabulary = SymbolVocabulary("word", ("<unk>", "a", "b"))
    shards = [
        write_file(tmp_path / "tokens-00000.bin", bytes([0, 1])),
        write_file(tmp_path / "tokens-00001.bin", b"\2\3"),
    ]
    files = [*shards, write_file(tmp_path / "vocabulary.json", vocabulary_bytes(vocabulary))]
    write_index(tmp_path, "tokens", {"num_bytes": 8, "num_unknown": 0, "shards": [2, 2]}, files)
    corpus = Corpus.open(tmp_path)
    assert corpus.read(0, 3).tolist() == [0, 1, 2]
    with pytest.raises(
        DataError, match=r"tokens-00001\.bin has token 3 at position 1, but the vocabulary has only 3 tokens"
    ):
        corpus.read(1, 4)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_bytes": 4, "num_unknown": 0, "shards": [3]}, r"it lists tokens-00000\.bin with 4 bytes, not 3"),
        ({"num_bytes": 4, "num_unknown": 0, "shards": [4, 1]}, r"it does not list tokens-00001\.bin"),
        ({"num_bytes": 4, "num_unknown": 0, "shards": []}, "shards: Tuple should have at least 1 item"),
        ({"num_bytes": "4", "num_unknown": 0, "shards": [4]}, "num_bytes: Input should be a valid integer"),
        ({"num_bytes": 4, "num_unknown": 0, "shards": [4], "dtype": "O"}, "dtype: Extra inputs are not permitted"),
    ],
)
def test_an_index_with_invalid_fields_is_refused(fields: dict[str, object], reason: str, tmp_path: Path) -> None:
    vocabulary = write_file(tmp_path / "vocabulary.json", b'{"level": "byte", "symbols": []}')
    write_index(tmp_path, "tokens", fields, [write_file(tmp_path / "tokens-00000.bin", b"text"), vocabulary])
    with pytest.raises(DataError, match=rf"index\.json is damaged \({reason}"):
        Corpus.open(tmp_path)


def test_a_store_of_another_kind_is_refused(byte_corpus: Corpus) -> None:
    with pytest.raises(DataError, match=r"holds no sequences \(kind: 'tokens'\)"):
        Sequences.open(byte_corpus.location)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "index.json").unlink(), "holds no prepared data"),
        (lambda folder: (folder / "index.json").write_text("{"), r"index\.json can't be read"),
        (lambda folder: (folder / "index.json").write_text("{}"), "is not in format stretto"),
        (lambda folder: edit(folder, kind="sequences"), "checksum mismatch"),
        (lambda folder: (folder / "tokens-00000.bin").unlink(), r"tokens-00000\.bin is missing"),
        (lambda folder: (folder / "tokens-00000.bin").write_bytes(b"short"), r"tokens-00000\.bin has 5 bytes"),
        (lambda folder: flip(folder / "vocabulary.json"), r"vocabulary\.json is damaged between bytes"),
        (lambda folder: flip(folder / "tokens-00000.bin"), r"tokens-00000\.bin is damaged between bytes"),
    ],
)
def test_a_damaged_corpus_is_refused_by_name(
    damage: Callable[[Path], object], reason: str, text_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    prepare_text([text_file], folder)
    damage(folder)
    with pytest.raises(DataError, match=reason):
        Corpus.open(folder).read(0, 10)


def test_a_folder_of_several_says_which_they_are(text_file: Path, tmp_path: Path) -> None:
    prepare_text([text_file], tmp_path / "out", TextOptions(validation_fraction=0.2))
    with pytest.raises(DataError, match=r"use one of its subfolders: train, valid"):
        Corpus.open(tmp_path / "out")


def edit(folder: Path, **values: object) -> None:
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**index, **values}))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)
