"""prepare_text: turns text files into a corpus, in bounded memory, completely or not at all."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from stretto.base.errors import DataError
from stretto.base.fingerprint import fingerprint
from stretto.prepare.downloads import urls_in_errors
from stretto.prepare.options import TextOptions, given_vocabulary, token_level
from stretto.prepare.prepare_job import (
    Job,
    OnProgress,
    PartResult,
    file_record,
    move_into_store,
    open_job,
    part_path,
)
from stretto.prepare.records import list_paths
from stretto.prepare.text_files import TextFiles
from stretto.prepare.tokenizer import open_tokenizer, train_tokenizer
from stretto.store.corpus import Corpus, CorpusFields, shard_name
from stretto.store.file_writer import FileWriter, write_file
from stretto.store.index import write_index
from stretto.store.subwords import split_lines
from stretto.store.vocabulary import (
    VOCABULARY_FILE,
    ByteVocabulary,
    Level,
    SymbolVocabulary,
    Vocabulary,
    split_symbols,
    token_dtype,
    vocabulary_bytes,
)

TextRange = tuple[int, int]  # the first byte, and the byte after the last one


@dataclass(frozen=True)
class TextPart:
    """A range of the text that becomes one shard."""

    start: int
    stop: int
    stamp: str  # of its files: changes when one of them is modified


@urls_in_errors()
def prepare_text(
    files: Sequence[Path | str] | Path | str,
    folder: Path | str,
    options: TextOptions = TextOptions(),
    *,
    workers: int | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> list[Corpus]:
    """Write text files as a corpus to `folder`; return the corpus of each split.

    With `validation_fraction`, the end of the text goes to `folder/valid` and the rest to `folder/train`.
    The vocabulary is built from the training text, unless one is given. Each shard but the last holds `shard_bytes` of
    text, plus the rest of its last line or compressed file. Shards are written by `workers` processes; by default, as
    many as pay off.
    """
    vocabulary = given_vocabulary(options)
    level = token_level(options, vocabulary)
    texts = TextFiles.open(list_paths(files))
    splits = _split(texts, Path(folder), options.validation_fraction)
    with open_job(folder, texts.paths, options.to_dict(), workers, on_progress) as job:
        parts = {split: _cut(texts, text_range, options.shard_bytes) for split, text_range in splits.items()}
        if vocabulary is None:
            training_parts = next(iter(parts.values()))  # those of the first split
            vocabulary = _build_vocabulary(job, texts, training_parts, level, options)
        for split in splits:
            _write(job, texts, split, parts[split], vocabulary)
        job.finish()
    return [Corpus.open(Path(folder) / split) for split in splits]


def _split(texts: TextFiles, folder: Path, validation_fraction: float) -> dict[str, TextRange]:
    """Return the byte range of each split by its name; without a validation split, the only one has no name."""
    if not validation_fraction:
        return {"": (0, texts.num_bytes)}
    boundary = texts.find_split(int(texts.num_bytes * (1 - validation_fraction)))
    splits = {"train": (0, boundary), "valid": (boundary, texts.num_bytes)}
    for split, (start, stop) in splits.items():
        if start == stop:
            remedy = "use a different fraction, or 0 and a separate validation file"
            raise DataError(f"validation_fraction={validation_fraction} leaves no text for {folder / split}; {remedy}")
    return splits


def _cut(texts: TextFiles, text_range: TextRange, shard_bytes: int) -> list[TextPart]:
    """Cut a range of the text into parts of about `shard_bytes`, at line starts, but not within a compressed file."""
    start, stop = text_range
    edges = [start]
    while (edge := edges[-1] + shard_bytes) < stop:
        edges.append(min(texts.next_cut(edge - 1), stop))  # at `edge` itself if a line starts there
    ranges = pairwise([*edges, stop] if edges[-1] < stop else edges)
    return [TextPart(start, stop, texts.stamp(start, stop)) for start, stop in ranges]


def _sizes(parts: Sequence[TextPart]) -> list[int]:
    return [part.stop - part.start for part in parts]


def _build_vocabulary(
    job: Job, texts: TextFiles, parts: Sequence[TextPart], level: Level, options: TextOptions
) -> Vocabulary:
    if level == "byte":
        return ByteVocabulary()
    if level == "subword":
        num_tokens = open_tokenizer(options.tokenizer)
        assert isinstance(num_tokens, int), "a tokenizer from a file is a given vocabulary"
        return train_tokenizer(job, parts, _sizes(parts), partial(_read_lines, texts), num_tokens)
    counts: Counter[str] = Counter()
    task = _CountSymbols(texts, level)
    for _, result in job.run_unordered("count", task, parts, _sizes(parts), f"counting {level}s", learned=""):
        counts.update(result["counts"])
    return SymbolVocabulary.from_counts(level, counts, options.max_symbols)


def _read_lines(texts: TextFiles, part: TextPart) -> Iterator[list[str]]:
    """Yield the lines of a part, as many as a span has at a time."""
    for span in texts.read_spans(part.start, part.stop, by_line=True):
        span.check_utf8()
        yield split_lines(span.text.decode())


def _write(job: Job, texts: TextFiles, split: str, parts: Sequence[TextPart], vocabulary: Vocabulary) -> None:
    """Write the store of one split, in the job's folder."""
    folder = job.folder / split
    folder.mkdir(exist_ok=True)
    task = _WriteTokens(texts, vocabulary, split)
    learned = fingerprint(vocabulary_bytes(vocabulary).decode())
    results = job.run(f"write{split}", task, parts, _sizes(parts), f"writing {job.target / split}", learned)
    # A part of white space without a line end has no words; a line end is the word `<eos>`.
    results = [result for result in results if result["num_tokens"]]
    if not results:
        raise DataError(f"the text for {job.target / split} is only white space, with no words; use different files")
    shards = [
        move_into_store(result["files"][0], job.folder, shard_name(number)) for number, result in enumerate(results)
    ]
    fields = CorpusFields(
        num_bytes=sum(_sizes(parts)),
        num_unknown=sum(result["num_unknown"] for result in results),
        shards=tuple(result["num_tokens"] for result in results),
    )
    vocabulary_file = write_file(folder / VOCABULARY_FILE, vocabulary_bytes(vocabulary))
    write_index(folder, fields.kind, fields.model_dump(mode="json"), [*shards, vocabulary_file])


@dataclass(frozen=True)
class _CountSymbols:
    """Counts the symbols of a part."""

    texts: TextFiles
    level: Level

    def __call__(self, part: TextPart, number: int, folder: Path, /) -> PartResult:
        counts: Counter[str] = Counter()
        for span in self.texts.read_spans(part.start, part.stop):
            span.check_utf8()
            counts.update(split_symbols(span.text, self.level))
        return {"counts": dict(counts)}


@dataclass(frozen=True)
class _WriteTokens:
    """Writes the tokens of a part."""

    texts: TextFiles
    vocabulary: Vocabulary
    split: str

    def __call__(self, part: TextPart, number: int, folder: Path, /) -> PartResult:
        dtype = token_dtype(len(self.vocabulary))
        # All but bytes are decoded from UTF-8. Subwords may cross the end of a word, but not that of a line.
        is_decoded, by_line = self.vocabulary.level != "byte", self.vocabulary.level == "subword"
        unknown, num_unknown = self.vocabulary.unknown_token, 0
        with FileWriter(part_path(folder, self.split, number, "tokens")) as writer:
            for span in self.texts.read_spans(part.start, part.stop, by_line=by_line):
                if is_decoded:
                    span.check_utf8()
                tokens = self.vocabulary.encode(span.text)
                writer.append(tokens.astype(dtype))
                num_unknown += 0 if unknown is None else int((tokens == unknown).sum())
            file = writer.finish()
        num_tokens = file.num_bytes // dtype.itemsize
        return {"files": [file_record(file, self.split)], "num_tokens": num_tokens, "num_unknown": num_unknown}
