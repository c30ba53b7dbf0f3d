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
    files: Sequence[Path | str],
    folder: Path | str,
    level: Level = "byte",
    *,
    vocabulary: Vocabulary | None = None,
    max_symbols: int | None = None,
    hold_out: float = 0.0,
    shard_tokens: int = 1 << 27,
    on_progress: OnProgress = lambda progress: None,
) -> list[Corpus]:
    """Write the corpus of some text files to `folder` and return it.

    With `hold_out`, the last part of the text becomes a corpus of its own: `folder/train` and `folder/valid`.
    The vocabulary is counted from the training part, unless another corpus's is given.
    """
    if not 0 <= hold_out < 1:
        raise DataError(f"hold_out={hold_out} is not in [0, 1); use a part such as 0.1")
    texts, folder = TextFiles.open(files), Path(folder)
    cut = texts.next_line(int(texts.num_bytes * (1 - hold_out))) if hold_out else texts.num_bytes
    parts = {folder: (0, cut)}
    if hold_out:
        parts = {folder / "train": (0, cut), folder / "valid": (cut, texts.num_bytes)}
    for part, (start, stop) in parts.items():
        if start == stop:
            raise DataError(f"hold_out={hold_out} leaves no whole line for {part}; use another part or more text")
        if part.exists():
            raise DataError(f"{part} exists already; delete it or choose another folder")
    if vocabulary is None:
        vocabulary = _count(texts, cut, level, max_symbols, on_progress)
    return [_write(texts, span, part, vocabulary, shard_tokens, on_progress) for part, span in parts.items()]


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
) -> Corpus:
    # Renamed into place at the end: a corpus that was cut off halfway never looks like one.
    partial = folder.with_name(folder.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        writer = _ShardWriter(partial, token_dtype(len(vocabulary)), shard_tokens)
        done = 0
        for piece in texts.pieces(*span):
            if vocabulary.level != "byte":
                piece.check()
            writer.append(vocabulary.encode(piece.text))
            done += len(piece.text)
            on_progress(Progress(f"writing {folder}", done, span[1] - span[0]))
        write_vocabulary(partial, vocabulary)
        index = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": writer.dtype.str,
            "num_bytes": done,
            "shards": writer.finish(),
        }
        (partial / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
        partial.rename(folder)
    except OSError as error:
        raise DataError(f"{folder} can't be written ({error.strerror}); choose another folder") from None
    return Corpus.open(folder)


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
