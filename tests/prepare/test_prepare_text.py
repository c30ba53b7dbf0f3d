import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.data import Corpus, TextOptions, prepare_text
from stretto.errors import DataError
from stretto.prepare import text_files as text_module
from stretto.prepare.prepare_job import Progress
from stretto.prepare.text_files import TextFiles
from stretto.store.vocabulary import ByteVocabulary, Level


@pytest.mark.parametrize("level", ["byte", "char", "word"])
def test_a_corpus_decodes_to_its_text(level: str, text_file: Path, tmp_path: Path) -> None:
    (corpus,) = prepare_text([text_file], tmp_path / "out", TextOptions(level=level))  # type: ignore[arg-type]
    decoded = corpus.vocabulary.decode(corpus.read(0, corpus.num_tokens).tolist())
    assert decoded == text_file.read_text(encoding="utf-8")
    assert corpus.num_bytes == text_file.stat().st_size


def test_shards_change_nothing(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = prepare_text([text_file], tmp_path / "one", TextOptions(level="word"))
    monkeypatch.setattr("stretto.prepare.prepare_text._COUNTED_BYTES", 333)
    (many,) = prepare_text([text_file], tmp_path / "many", TextOptions(level="word", shard_bytes=501), workers=1)
    assert len(one.fields.shards) == 1 < text_file.stat().st_size // 550 < len(many.fields.shards)
    assert np.array_equal(one.read(0, one.num_tokens), many.read(0, many.num_tokens))
    assert np.array_equal(one.read(95, 410), many.read(95, 410))


@pytest.mark.long
@pytest.mark.short
@pytest.mark.parametrize("level", ["byte", "word"])
def test_any_number_of_workers_writes_the_same_bytes(level: Level, text_file: Path, tmp_path: Path) -> None:
    for workers in (1, 2):
        prepare_text(
            text_file,
            tmp_path / str(workers),
            TextOptions(level=level, validation_fraction=0.2, shard_bytes=4000),
            workers=workers,
        )
    assert content(tmp_path / "1") == content(tmp_path / "2")
    assert (tmp_path / "1" / "train" / "tokens-00002.bin").exists()


def content(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_last_part_of_white_space_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one\ntwo\n      ")
    (corpus,) = prepare_text(path, tmp_path / "out", TextOptions(level="word", shard_bytes=4), workers=1)
    assert corpus.fields.shards == (2, 2)
    assert len(list((tmp_path / "out").iterdir())) == 5


def test_the_validation_part_is_the_last_lines_with_the_training_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {number}\n" for number in range(100)))
    train, valid = prepare_text([path], tmp_path / "out", TextOptions(level="word", validation_fraction=0.2))
    assert train.vocabulary == valid.vocabulary
    held = valid.vocabulary.decode(valid.read(0, valid.num_tokens).tolist())
    assert held == "line <unk>\n" * (valid.num_tokens // 3)
    assert train.num_bytes + valid.num_bytes == path.stat().st_size
    assert 0.15 < valid.num_bytes / path.stat().st_size <= 0.2


def test_the_most_frequent_words_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("b b b a a c <unk>")
    (corpus,) = prepare_text([path], tmp_path / "out", TextOptions(level="word", max_symbols=3))
    assert corpus.read(0, corpus.num_tokens).tolist() == [1, 1, 1, 2, 2, 0, 0]


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("one two three four five", "five"),  # a word
        ("acgt" * 5, "tacgt"),  # a byte
        ("ä" * 20, "ä" * 4),  # a character: the cut falls within one
        ("one two three four\nfi ve", "fi ve"),  # a line, where one is near
        ("one\n" * 5, "one\n"),
    ],
)
def test_a_text_without_lines_is_split_between_words_or_characters(text: str, start: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text)
    train, valid = prepare_text(tmp_path / "a.txt", tmp_path / "out", TextOptions(validation_fraction=0.225))
    whole = [corpus.vocabulary.decode(corpus.read(0, corpus.num_tokens).tolist()) for corpus in (train, valid)]
    assert whole == [text.removesuffix(start), start]


@given(words=st.lists(st.text("aé\n ", max_size=9), min_size=1, max_size=30), block=st.integers(4, 40))
@settings(max_examples=50, deadline=None)
def test_spans_cover_the_text_and_split_no_word(words: list[str], block: int) -> None:
    content = "\n".join(words).encode() or b" "
    with tempfile.NamedTemporaryFile() as file, pytest.MonkeyPatch.context() as patch:
        Path(file.name).write_bytes(content)
        patch.setattr(text_module, "_READ_BYTES", block)
        files = TextFiles.open([file.name])
        pieces = list(files.read_spans(0, files.num_bytes))
    assert b"".join(piece.text for piece in pieces) == content
    longest = max(map(len, content.split()), default=0)
    if longest < block:
        assert [word for piece in pieces for word in piece.text.split()] == content.split()
    for piece in pieces:
        piece.check_utf8()


def test_progress_ends_where_the_text_does(text_file: Path, tmp_path: Path) -> None:
    seen: list[Progress] = []
    prepare_text([text_file, text_file], tmp_path / "out", TextOptions(level="word"), on_progress=seen.append)
    ends = {progress.phase: (progress.done, progress.total) for progress in seen}
    size = 2 * text_file.stat().st_size
    assert ends == {"counting words": (size, size), f"writing {tmp_path / 'out'}": (size, size)}


def test_an_error_in_text_names_file_and_position(text_file: Path, tmp_path: Path) -> None:
    empty, broken, blank = tmp_path / "empty.txt", tmp_path / "broken.txt", tmp_path / "blank.txt"
    empty.touch()
    broken.write_bytes(b"good\nbad \xff\n")
    blank.write_text("  \t ")
    out = tmp_path / "out"
    cases: list[tuple[list[Path], dict[str, Any], str]] = [
        ([], {}, "there are no files to prepare; give at least one"),
        ([tmp_path / "missing"], {}, "missing is not a file"),
        ([text_file, empty], {}, r"empty\.txt is empty"),
        ([broken], {"level": "word"}, r"broken\.txt: byte 10 is not UTF-8"),
        ([blank], {"level": "word"}, "the text for .*out is only white space, with no words"),
        ([text_file], {"validation_fraction": 1.5}, r"validation_fraction=1\.5"),
        ([text_file], {"validation_fraction": 1e-9}, "leaves no text for"),
        ([text_file], {"level": "bpe"}, "level='bpe' is not allowed; choose from byte, char, word"),
        (
            [text_file],
            {"level": "char", "vocabulary": ByteVocabulary()},
            "level=char is not the given vocabulary's level",
        ),
        ([text_file], {"shard_bytes": 0}, "shard_bytes=0 must be at least 1"),
        ([text_file], {"workers": 0}, "workers=0 must be at least 1"),
        ([text_file], {"max_symbols": 9}, "max_symbols=9 has no effect on bytes"),
        ([text_file], {"max_symbols": 1, "level": "word"}, "max_symbols=1 is too small"),
    ]
    for files, options, reason in cases:
        workers = options.pop("workers", None)
        with pytest.raises(DataError, match=reason):
            prepare_text(files, out, TextOptions(**options), workers=workers)
        assert not out.exists()


def test_a_corpus_is_never_overwritten(text_file: Path, tmp_path: Path) -> None:
    prepare_text([text_file], tmp_path / "out")
    with pytest.raises(DataError, match="already holds prepared data"):
        prepare_text([text_file], tmp_path / "out")
    with pytest.raises(DataError, match="already exists and is not an empty folder"):
        prepare_text([text_file], text_file)


def test_only_tokens_of_the_corpus_can_be_read(text_file: Path, tmp_path: Path) -> None:
    (corpus,) = prepare_text(text_file, tmp_path / "out")
    for start, stop in ((-1, 5), (5, 4), (0, corpus.num_tokens + 1)):
        with pytest.raises(DataError, match="requested tokens are outside the"):
            corpus.read(start, stop)


def test_unknown_words_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("b b b a a c <unk>")
    (corpus,) = prepare_text(path, tmp_path / "out", TextOptions(level="word", max_symbols=3))
    assert corpus.num_unknown == 2


def test_the_error_names_a_folder_that_cannot_be_written(text_file: Path) -> None:
    with pytest.raises(DataError, match=r"^/proc/nowhere: .*check its permissions and the free space$"):
        prepare_text([text_file], "/proc/nowhere/out")


def test_an_error_in_the_validation_part_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"word\n" * 50 + b"\xff\n")
    with pytest.raises(DataError, match="byte 251 is not UTF-8"):
        prepare_text(path, tmp_path / "out", TextOptions(level="word", validation_fraction=0.2))
    assert not (tmp_path / "out" / "train").exists()


def test_an_interrupted_preparation_leaves_no_corpus(text_file: Path, tmp_path: Path) -> None:
    def fail(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_text([text_file], tmp_path / "out", on_progress=fail)
    with pytest.raises(DataError, match="out does not exist; make it with"):
        Corpus.open(tmp_path / "out")
    prepare_text([text_file], tmp_path / "out")
    assert not list(tmp_path.glob("*.partial"))
