"""Prepare: text files into a corpus, in bounded memory, and whole or not at all."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stretto.base.errors import DataError
from stretto.data.corpus import FORMAT, INDEX, VERSION, Corpus
from stretto.data.text import TextFiles
from stretto.data.vocabulary import (
    UNKNOWN,
    ByteVocabulary,
    Level,
    SymbolVocabulary,
    Tokens,
    Vocabulary,
    split_symbols,
    token_dtype,
    write_vocabulary,
)


@dataclass(frozen=True)
class Progress:
    """How far a preparation is, in bytes of text."""

    phase: str
    done: int
    total: int


OnProgress = Callable[[Progress], None]


def prepare_text(
    files: Sequence[Path | str] | Path | str,
    folder: Path | str,
    level: Level | None = None,
    *,
    vocabulary: Vocabulary | None = None,
    max_symbols: int | None = None,
    hold_out: float = 0.0,
    shard_tokens: int = 1 << 27,
    on_progress: OnProgress = lambda progress: None,
) -> list[Corpus]:
    """Write the corpus of some text files to `folder` and return it. `level` is byte, if nothing else is said.

    With `hold_out`, the last part of the text becomes a corpus of its own: `folder/train` and `folder/valid`.
    The vocabulary is counted from the training part, unless another corpus's is given.
    """
    if not 0 <= hold_out < 1:
        raise DataError(f"hold-out={hold_out} is not in [0, 1); use a part such as 0.1")
    if shard_tokens < 1:
        raise DataError(f"shard_tokens={shard_tokens} must be at least 1")
    level = _check_level(level, vocabulary, max_symbols)
    texts, folder = TextFiles.open([files] if isinstance(files, Path | str) else files), Path(folder)
    cut = texts.next_line(int(texts.num_bytes * (1 - hold_out))) if hold_out else texts.num_bytes
    parts = {folder: (0, cut)}
    if hold_out:
        parts = {folder / "train": (0, cut), folder / "valid": (cut, texts.num_bytes)}
    for part, (start, stop) in parts.items():
        if start == stop:
            raise DataError(f"hold-out={hold_out} leaves no whole line for {part}; use another part or more text")
        if (part / INDEX).exists():
            raise DataError(f"{part} holds a corpus already; choose another folder, or delete that corpus first")
        if part.exists():
            raise DataError(f"{part} exists already and is no corpus; choose another folder")
    try:
        if vocabulary is None:
            vocabulary = _count(texts, cut, level, max_symbols, on_progress)
        partials = [_write(texts, span, part, vocabulary, shard_tokens, on_progress) for part, span in parts.items()]
        # Renamed into place at the very end: what was cut off halfway never looks like a corpus.
        for part, partial in zip(parts, partials, strict=True):
            partial.rename(part)
    except OSError as error:
        raise DataError(f"{error.filename or folder}: {error.strerror}; is it readable, and is there room?") from None
    return [Corpus.open(part) for part in parts]


def _check_level(level: Level | None, vocabulary: Vocabulary | None, max_symbols: int | None) -> Level:
    """Return the level that is meant; refuse options that contradict each other."""
    if level not in (None, "byte", "char", "word"):
        raise DataError(f"level={level!r} is not byte, char or word; use one of these")
    if vocabulary is not None and level not in (None, vocabulary.level):
        raise DataError(f"level={level} is not that of the given vocabulary, {vocabulary.level}; leave one of them out")
    meant = vocabulary.level if vocabulary is not None else level or "byte"
    if max_symbols is not None and (vocabulary is not None or meant == "byte"):
        what = "a given vocabulary" if vocabulary is not None else "bytes"
        raise DataError(f"max-symbols={max_symbols} has no meaning for {what}; leave it out")
    if max_symbols is not None and max_symbols < 2:
        raise DataError(f"max-symbols={max_symbols} leaves nothing but {UNKNOWN}, which it counts too; use at least 2")
    return meant


def _count(texts: TextFiles, stop: int, level: Level, max_symbols: int | None, on_progress: OnProgress) -> Vocabulary:
    """Return the vocabulary of a text: the most frequent symbols first, ties in the order of the symbols."""
    if level == "byte":
        return ByteVocabulary()
    counts: Counter[str] = Counter()
    done = 0
    for piece in texts.pieces(0, stop):
        piece.check()
        counts.update(split_symbols(piece.text, level))
        done += len(piece.text)
        on_progress(Progress(f"counting {level}s", done, stop))
    del counts[UNKNOWN]
    known = sorted(counts, key=lambda symbol: (-counts[symbol], symbol))
    return SymbolVocabulary(level, (UNKNOWN, *known[: None if max_symbols is None else max_symbols - 1]))


def _write(
    texts: TextFiles,
    span: tuple[int, int],
    folder: Path,
    vocabulary: Vocabulary,
    shard_tokens: int,
    on_progress: OnProgress,
) -> Path:
    """Write a corpus beside where it belongs; return where."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    writer = _ShardWriter(partial, token_dtype(len(vocabulary)), shard_tokens)
    done = num_unknown = 0
    for piece in texts.pieces(*span):
        if vocabulary.level != "byte":
            piece.check()
        tokens = vocabulary.encode(piece.text)
        writer.append(tokens)
        num_unknown += int((tokens == 0).sum()) if vocabulary.level != "byte" else 0
        done += len(piece.text)
        on_progress(Progress(f"writing {folder}", done, span[1] - span[0]))
    write_vocabulary(partial, vocabulary)
    index = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": writer.dtype.str,
        "num_bytes": done,
        "num_unknown": num_unknown,
        "shards": writer.finish(),
    }
    (partial / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    return partial


@dataclass
class _ShardWriter:
    """Tokens into files of `shard_tokens` each, the last one shorter."""

    folder: Path
    dtype: np.dtype[np.unsignedinteger[Any]]
    shard_tokens: int
    _shards: list[dict[str, Any]] = field(default_factory=list)

    def append(self, tokens: Tokens) -> None:
        while len(tokens):
            if not self._shards or self._shards[-1]["num_tokens"] == self.shard_tokens:
                self._shards.append({"file": f"tokens-{len(self._shards):05}.bin", "num_tokens": 0})
            shard = self._shards[-1]
            fitting = tokens[: self.shard_tokens - shard["num_tokens"]]
            with (self.folder / shard["file"]).open("ab") as file:
                file.write(fitting.astype(self.dtype).tobytes())
            shard["num_tokens"] += len(fitting)
            tokens = tokens[len(fitting) :]

    def finish(self) -> list[dict[str, Any]]:
        if not self._shards:
            raise DataError("the text holds no words, only white space; give other files")
        return self._shards
