"""Prepare: text files into a corpus, in bounded memory, and whole or not at all."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from stretto.base.errors import DataError
from stretto.prepare.parts import PART_BYTES, Job, OnProgress, Record, file_record, open_job, part_path, place_file
from stretto.prepare.text import TextFiles
from stretto.store.corpus import KIND, Corpus, shard_name
from stretto.store.vocabulary import FILE as VOCABULARY
from stretto.store.vocabulary import (
    UNKNOWN,
    ByteVocabulary,
    Level,
    SymbolVocabulary,
    Vocabulary,
    split_symbols,
    token_dtype,
    vocabulary_bytes,
)
from stretto.store.writer import FileWriter, write_file, write_index

Bounds = tuple[int, int]  # of some text: from a byte up to another


def prepare_text(
    files: Sequence[Path | str] | Path | str,
    folder: Path | str,
    level: Level | None = None,
    *,
    vocabulary: Vocabulary | None = None,
    max_symbols: int | None = None,
    hold_out: float = 0.0,
    shard_bytes: int = PART_BYTES,
    workers: int | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> list[Corpus]:
    """Write the corpus of some text files to `folder` and return it. `level` is byte, if nothing else is said.

    With `hold_out`, the last part of the text becomes a corpus of its own: `folder/train` and `folder/valid`.
    The vocabulary is counted from the training part, unless another corpus's is given. A shard is what `shard_bytes`
    of text become, up to the end of a line; shards are made by `workers` processes, as many as it is worth if not said.
    """
    check_hold_out(hold_out)
    if shard_bytes < 1:
        raise DataError(f"--shard-bytes={shard_bytes} must be at least 1")
    level = check_level(level, vocabulary, max_symbols)
    texts = TextFiles.open([files] if isinstance(files, Path | str) else files)
    cut = texts.edge_after(int(texts.num_bytes * (1 - hold_out))) if hold_out else texts.num_bytes
    sides = {"train": (0, cut), "valid": (cut, texts.num_bytes)} if hold_out else {"": (0, cut)}
    for side, (start, stop) in sides.items():
        if start == stop:
            raise DataError(
                f"--hold-out={hold_out} leaves nothing for {Path(folder) / side}; use another part, --hold-out 0, or "
                "--valid FILE"
            )
    options = {
        "what": "text",
        "level": level,
        "vocabulary": None if vocabulary is None else vocabulary_bytes(vocabulary).decode(),
        "max_symbols": max_symbols,
        "hold_out": hold_out,
        "shard_bytes": shard_bytes,
    }
    with open_job(folder, texts.paths, options, workers, on_progress) as job:
        parts = {side: _cut(texts, bounds, shard_bytes) for side, bounds in sides.items()}
        if vocabulary is None:
            vocabulary = _count(job, texts, next(iter(parts.values())), level, max_symbols)
        for side in sides:
            _write(job, texts, side, parts[side], vocabulary)
        job.finish()
    return [Corpus.open(Path(folder) / side) for side in sides]


def check_hold_out(hold_out: float) -> None:
    """Refuse what is not a part."""
    if not 0 <= hold_out < 1:
        raise DataError(f"--hold-out={hold_out} is not in [0, 1); use a part such as 0.1")


def check_level(level: Level | None, vocabulary: Vocabulary | None, max_symbols: int | None) -> Level:
    """Return the level that is meant; refuse options that contradict each other."""
    if level not in (None, "byte", "char", "word"):
        raise DataError(f"--level={level!r} is not byte, char or word; use one of these")
    if vocabulary is not None and level not in (None, vocabulary.level):
        raise DataError(
            f"--level={level} is not that of the given vocabulary, {vocabulary.level}; leave one of them out"
        )
    meant = vocabulary.level if vocabulary is not None else level or "byte"
    if max_symbols is not None and (vocabulary is not None or meant == "byte"):
        what = "a given vocabulary" if vocabulary is not None else "bytes"
        raise DataError(f"--max-symbols={max_symbols} has no meaning for {what}; leave it out")
    if max_symbols is not None and max_symbols < 2:
        raise DataError(
            f"--max-symbols={max_symbols} leaves nothing but {UNKNOWN}, which it counts too; use at least 2"
        )
    return meant


def most_frequent(counts: Counter[str], level: Level, max_symbols: int | None) -> Vocabulary:
    """Return the vocabulary of what was counted: the most frequent symbols first, ties in the order of the symbols."""
    known = sorted(counts.keys() - {UNKNOWN}, key=lambda symbol: (-counts[symbol], symbol))
    return SymbolVocabulary(level, (UNKNOWN, *known[: None if max_symbols is None else max_symbols - 1]))


def _cut(texts: TextFiles, bounds: Bounds, shard_bytes: int) -> list[Bounds]:
    """Cut a text into parts that start where a line does; how many work on them has no say in it."""
    start, stop = bounds
    edges = [start]
    while (edge := edges[-1] + shard_bytes) < stop:
        edges.append(min(texts.next_line(edge - 1), stop))
    edges = [*edges, stop] if edges[-1] < stop else edges
    return list(pairwise(edges))


def _sizes(parts: Sequence[Bounds]) -> list[int]:
    return [stop - start for start, stop in parts]


def _count(job: Job, texts: TextFiles, parts: Sequence[Bounds], level: Level, max_symbols: int | None) -> Vocabulary:
    if level == "byte":
        return ByteVocabulary()
    counts: Counter[str] = Counter()
    for _, record in job.each("count", _CountSymbols(texts, level), parts, _sizes(parts), f"counting {level}s"):
        counts.update(record["counts"])
    return most_frequent(counts, level, max_symbols)


def _write(job: Job, texts: TextFiles, side: str, parts: Sequence[Bounds], vocabulary: Vocabulary) -> None:
    """Write the store of one side, in the job's folder."""
    folder = job.folder / side
    folder.mkdir(exist_ok=True)
    work = _WriteTokens(texts, vocabulary, side)
    records = job.run(f"write{side}", work, parts, _sizes(parts), f"writing {job.target / side}")
    # White space at the end of a text may be a part of its own, without a word.
    records = [record for record in records if record["num_tokens"]]
    if not records:
        raise DataError("the text holds no words, only white space; give other files")
    shards = [place_file(record["files"][0], job.folder, shard_name(number)) for number, record in enumerate(records)]
    fields = {
        "num_bytes": sum(_sizes(parts)),
        "num_unknown": sum(record["num_unknown"] for record in records),
        "shards": [record["num_tokens"] for record in records],
    }
    write_index(folder, KIND, fields, [*shards, write_file(folder / VOCABULARY, vocabulary_bytes(vocabulary))])


@dataclass(frozen=True)
class _CountSymbols:
    """Count the symbols of a part."""

    texts: TextFiles
    level: Level

    def __call__(self, part: Bounds, number: int, folder: Path, /) -> Record:
        counts: Counter[str] = Counter()
        for piece in self.texts.pieces(*part):
            piece.check()
            counts.update(split_symbols(piece.text, self.level))
        return {"counts": dict(counts)}


@dataclass(frozen=True)
class _WriteTokens:
    """Write the tokens of a part."""

    texts: TextFiles
    vocabulary: Vocabulary
    side: str

    def __call__(self, part: Bounds, number: int, folder: Path, /) -> Record:
        dtype = token_dtype(len(self.vocabulary))
        has_unknown = self.vocabulary.level != "byte"
        num_unknown = 0
        with FileWriter(part_path(folder, self.side, number, "tokens")) as writer:
            for piece in self.texts.pieces(*part):
                if has_unknown:
                    piece.check()
                tokens = self.vocabulary.encode(piece.text)
                writer.append(tokens.astype(dtype))
                num_unknown += int((tokens == 0).sum()) if has_unknown else 0
            file = writer.finish()
        return {
            "files": [file_record(file, self.side)],
            "num_tokens": file.num_bytes // dtype.itemsize,
            "num_unknown": num_unknown,
        }
