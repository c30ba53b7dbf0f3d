"""Prepare: text files into a corpus, in bounded memory, and whole or not at all."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from stretto.base.errors import DataError
from stretto.prepare.prepare_job import (
    PART_BYTES,
    Job,
    OnProgress,
    PartResult,
    file_record,
    move_into_store,
    open_job,
    part_path,
)
from stretto.prepare.text_files import TextFiles
from stretto.store.corpus import KIND, Corpus, shard_name
from stretto.store.file_writer import FileWriter, write_file, write_index
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

LowerBounds = tuple[int, int]  # of some text: from a byte up to another


def prepare_text(
    files: Sequence[Path | str] | Path | str,
    folder: Path | str,
    level: Level | None = None,
    *,
    vocabulary: Vocabulary | None = None,
    max_symbols: int | None = None,
    validation_fraction: float = 0.0,
    shard_bytes: int = PART_BYTES,
    workers: int | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> list[Corpus]:
    """Write the corpus of some text files to `folder` and return it. `level` is byte, if nothing else is said.

    With `validation_fraction`, the last part of the text becomes a corpus of its own: `folder/train` and `folder/valid`.
    The vocabulary is counted from the training part, unless another corpus's is given. A shard is what `shard_bytes`
    of text become, up to the end of a line; shards are made by `workers` processes, as many as it is worth if not said.
    """
    check_validation_fraction(validation_fraction)
    if shard_bytes < 1:
        raise DataError(f"--shard-bytes={shard_bytes} must be at least 1")
    level = check_level(level, vocabulary, max_symbols)
    texts = TextFiles.open([files] if isinstance(files, Path | str) else files)
    cut = texts.find_split(int(texts.num_bytes * (1 - validation_fraction))) if validation_fraction else texts.num_bytes
    splits = {"train": (0, cut), "valid": (cut, texts.num_bytes)} if validation_fraction else {"": (0, cut)}
    for split, (start, stop) in splits.items():
        if start == stop:
            raise DataError(
                f"--validation-fraction={validation_fraction} leaves nothing for {Path(folder) / split}; use another part, --validation-fraction 0, or "
                "--valid FILE"
            )
    options = {
        "what": "text",
        "level": level,
        "vocabulary": None if vocabulary is None else vocabulary_bytes(vocabulary).decode(),
        "max_symbols": max_symbols,
        "validation_fraction": validation_fraction,
        "shard_bytes": shard_bytes,
    }
    with open_job(folder, texts.paths, options, workers, on_progress) as job:
        parts = {split: _cut(texts, bounds, shard_bytes) for split, bounds in splits.items()}
        if vocabulary is None:
            vocabulary = _count(job, texts, next(iter(parts.values())), level, max_symbols)
        for split in splits:
            _write(job, texts, split, parts[split], vocabulary)
        job.finish()
    return [Corpus.open(Path(folder) / split) for split in splits]


def check_validation_fraction(validation_fraction: float) -> None:
    """Refuse what is not a part."""
    if not 0 <= validation_fraction < 1:
        raise DataError(f"--validation-fraction={validation_fraction} is not in [0, 1); use a part such as 0.1")


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


def _cut(texts: TextFiles, bounds: LowerBounds, shard_bytes: int) -> list[LowerBounds]:
    """Cut a text into parts that start where a line does; how many work on them has no say in it."""
    start, stop = bounds
    edges = [start]
    while (edge := edges[-1] + shard_bytes) < stop:
        edges.append(min(texts.next_line(edge - 1), stop))
    edges = [*edges, stop] if edges[-1] < stop else edges
    return list(pairwise(edges))


def _sizes(parts: Sequence[LowerBounds]) -> list[int]:
    return [stop - start for start, stop in parts]


def _count(
    job: Job, texts: TextFiles, parts: Sequence[LowerBounds], level: Level, max_symbols: int | None
) -> Vocabulary:
    if level == "byte":
        return ByteVocabulary()
    counts: Counter[str] = Counter()
    for _, record in job.run_unordered(
        "count", _CountSymbols(texts, level), parts, _sizes(parts), f"counting {level}s"
    ):
        counts.update(record["counts"])
    return most_frequent(counts, level, max_symbols)


def _write(job: Job, texts: TextFiles, split: str, parts: Sequence[LowerBounds], vocabulary: Vocabulary) -> None:
    """Write the store of one split, in the job's folder."""
    folder = job.folder / split
    folder.mkdir(exist_ok=True)
    task = _WriteTokens(texts, vocabulary, split)
    records = job.run(f"write{split}", task, parts, _sizes(parts), f"writing {job.target / split}")
    # White space at the end of a text may be a part of its own, without a word.
    records = [record for record in records if record["num_tokens"]]
    if not records:
        raise DataError("the text holds no words, only white space; give other files")
    shards = [
        move_into_store(record["files"][0], job.folder, shard_name(number)) for number, record in enumerate(records)
    ]
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

    def __call__(self, part: LowerBounds, number: int, folder: Path, /) -> PartResult:
        counts: Counter[str] = Counter()
        for piece in self.texts.read_spans(*part):
            piece.check()
            counts.update(split_symbols(piece.text, self.level))
        return {"counts": dict(counts)}


@dataclass(frozen=True)
class _WriteTokens:
    """Write the tokens of a part."""

    texts: TextFiles
    vocabulary: Vocabulary
    split: str

    def __call__(self, part: LowerBounds, number: int, folder: Path, /) -> PartResult:
        dtype = token_dtype(len(self.vocabulary))
        has_unknown = self.vocabulary.level != "byte"
        num_unknown = 0
        with FileWriter(part_path(folder, self.split, number, "tokens")) as writer:
            for piece in self.texts.read_spans(*part):
                if has_unknown:
                    piece.check()
                tokens = self.vocabulary.encode(piece.text)
                writer.append(tokens.astype(dtype))
                num_unknown += int((tokens == 0).sum()) if has_unknown else 0
            file = writer.finish()
        return {
            "files": [file_record(file, self.split)],
            "num_tokens": file.num_bytes // dtype.itemsize,
            "num_unknown": num_unknown,
        }
