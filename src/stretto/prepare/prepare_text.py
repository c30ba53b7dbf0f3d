"""prepare_text: turns text files into a corpus, in bounded memory, completely or not at all."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path

from stretto.base.errors import DataError
from stretto.prepare.compression import content_size, is_compressed
from stretto.prepare.downloads import urls_in_errors
from stretto.prepare.file_stamp import file_stamp
from stretto.prepare.options import TextOptions, given_vocabulary, token_level
from stretto.prepare.part_runner import PartResult, PartResults, file_record, in_order, part_name
from stretto.prepare.prepare_job import Job, OnProgress, Workers, open_job
from stretto.prepare.records import list_paths
from stretto.prepare.saved_vocabulary import SavedVocabulary, save_vocabulary
from stretto.prepare.symbol_counts import SymbolCounter, build_vocabulary, counts_name, merge_paths
from stretto.prepare.text_files import TextFiles
from stretto.prepare.tokenizer import open_tokenizer, train_tokenizer
from stretto.prepare.work_folder import WorkFolder, join_location
from stretto.store.corpus import Corpus, CorpusFields, shard_name
from stretto.store.subwords import split_lines
from stretto.store.vocabulary import VOCABULARY_FILE, ByteVocabulary, Level, Vocabulary, split_symbols, token_dtype

_COUNTED_BYTES = 64 << 20  # of text in a part whose symbols are counted
TextRange = tuple[int, int]  # the first byte, and the byte after the last one


@dataclass(frozen=True)
class TextPart:
    """A range of the text that becomes one shard."""

    texts: TextFiles  # those of all files that the range is in
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
    executor: Workers = None,
    on_progress: OnProgress = lambda progress: None,
) -> list[Corpus]:
    """Write text files as a corpus to `folder`; return the corpus of each split.

    With `validation_fraction`, the end of the text goes to `folder/valid` and the rest to `folder/train`.
    The vocabulary is built from the training text, unless one is given. Each shard but the last holds `shard_bytes` of
    text, plus the rest of its last line or compressed file. Shards are written by `workers` processes; by default, as
    many as pay off. With an `executor`, its workers write them, or the ranks of a launcher; they must see the files and
    the folder, which may be URLs. The result is the same, byte for byte.
    """
    vocabulary = given_vocabulary(options)
    level = token_level(options, vocabulary)
    paths = list_paths(files, is_local=executor is None)
    names = ("train", "valid") if options.validation_fraction else ("",)
    with open_job(folder, paths, options.to_dict(), workers, on_progress, executor, names) as job:
        texts = TextFiles.open(paths, _packed_sizes(job, paths))
        splits = _split(texts, folder, options.validation_fraction)
        parts = {split: _cut(texts, splits[split], options.shard_bytes) for split in splits}
        saved = _save_vocabulary(job, vocabulary, texts, next(iter(parts.values())), level, options)
        _write(job, parts, saved)
    return [Corpus.open(join_location(folder, split)) for split in splits]


def _packed_sizes(job: Job, paths: Sequence[Path]) -> dict[int, int]:
    """Return the size of the content of each compressed file, by its index; they are read for that, in parallel."""
    packed = {index: path for index, path in enumerate(paths) if is_compressed(path) and path.is_file()}
    if not packed:
        return {}
    parts = [(path, file_stamp(path)) for path in packed.values()]
    sizes = [path.stat().st_size for path in packed.values()]
    found = job.run("size", _FindSize(), parts, sizes, "reading packed files", _merge_sizes)["sizes"]
    return dict(zip(packed, found, strict=True))


@dataclass(frozen=True)
class _FindSize:
    """Finds the size of the content of a compressed file."""

    def __call__(self, part: tuple[Path, str], number: int, folder: WorkFolder, /) -> PartResult:
        return {"size": content_size(part[0])}


def _merge_sizes(results: PartResults) -> PartResult:
    return {"sizes": [result["size"] for result in in_order(results)]}


def _split(texts: TextFiles, folder: Path | str, validation_fraction: float) -> dict[str, TextRange]:
    """Return the byte range of each split by its name; without a validation split, the only one has no name."""
    if not validation_fraction:
        return {"": (0, texts.num_bytes)}
    boundary = texts.find_split(int(texts.num_bytes * (1 - validation_fraction)))
    splits = {"train": (0, boundary), "valid": (boundary, texts.num_bytes)}
    for split, (start, stop) in splits.items():
        if start == stop:
            remedy = "use a different fraction, or 0 and a separate validation file"
            problem = f"validation_fraction={validation_fraction} leaves no text for {join_location(folder, split)}"
            raise DataError(f"{problem}; {remedy}")
    return splits


def _cut(texts: TextFiles, text_range: TextRange, shard_bytes: int) -> list[TextPart]:
    """Cut a range of the text into parts of about `shard_bytes`, at line starts, but not within a compressed file."""
    start, stop = text_range
    edges = [start]
    while (edge := edges[-1] + shard_bytes) < stop:
        edges.append(min(texts.next_cut(edge - 1), stop))  # at `edge` itself if a line starts there
    ranges = pairwise([*edges, stop] if edges[-1] < stop else edges)
    return [TextPart(texts.within(start, stop), start, stop, texts.stamp(start, stop)) for start, stop in ranges]


def _sizes(parts: Sequence[TextPart]) -> list[int]:
    return [part.stop - part.start for part in parts]


def _save_vocabulary(
    job: Job,
    vocabulary: Vocabulary | None,
    texts: TextFiles,
    training_parts: Sequence[TextPart],
    level: Level,
    options: TextOptions,
) -> SavedVocabulary:
    """Save the given vocabulary for the tasks, or one that is built from the training text."""
    if vocabulary is not None or level == "byte":
        return save_vocabulary(job, lambda: vocabulary or ByteVocabulary())
    parts = training_parts
    if parts and options.shard_bytes != _COUNTED_BYTES:  # counts stay the same if `shard_bytes` changes
        parts = _cut(texts, (parts[0].start, parts[-1].stop), _COUNTED_BYTES)
    if level == "subword":
        num_tokens = open_tokenizer(options.tokenizer)
        assert isinstance(num_tokens, int), "a tokenizer from a file is a given vocabulary"
        return train_tokenizer(job, parts, _sizes(parts), _TextLines(), num_tokens)
    counts = job.run("count", _CountSymbols(level), parts, _sizes(parts), f"counting {level}s", merge_paths)
    return build_vocabulary(job, level, counts["paths"], options.max_symbols)


@dataclass(frozen=True)
class _TextLines:
    """Reads the lines of a part, as many as a span has at a time."""

    def __call__(self, part: TextPart, /) -> Iterator[list[str]]:
        for span in part.texts.read_spans(part.start, part.stop, by_line=True):
            span.check_utf8()
            yield split_lines(span.text.decode())


def _write(job: Job, parts: Mapping[str, Sequence[TextPart]], vocabulary: SavedVocabulary) -> None:
    """Write the store of each split."""
    # All splits in one phase: their parts are written in parallel, and don't depend on the split.
    listed = [part for of_split in parts.values() for part in of_split]
    merge = partial(_make_stores, job, parts, vocabulary)
    job.run("write", _WriteTokens(vocabulary), listed, _sizes(listed), f"writing {job.target}", merge)


def _make_stores(
    job: Job, parts: Mapping[str, Sequence[TextPart]], vocabulary: SavedVocabulary, part_results: PartResults
) -> PartResult:
    results, splits = iter(in_order(part_results)), dict[str, list[PartResult]]()
    for split, of_split in parts.items():
        # A part of white space without a line end has no words; a line end is the word `<eos>`.
        splits[split] = [result for result in islice(results, len(of_split)) if result["num_tokens"]]
        if not splits[split]:
            location = join_location(job.target, split)
            raise DataError(f"the text for {location} is only white space, with no words; use different files")
    for split, of_store in splits.items():
        shards = [(result["files"][0], shard_name(number)) for number, result in enumerate(of_store)]
        fields = CorpusFields(
            num_bytes=sum(_sizes(parts[split])),
            num_unknown=sum(result["num_unknown"] for result in of_store),
            shards=tuple(result["num_tokens"] for result in of_store),
        )
        contents = {VOCABULARY_FILE: job.folder.read(vocabulary.name)}
        job.add_store(split, fields.kind, fields.model_dump(mode="json"), shards, contents)
    return {}


@dataclass(frozen=True)
class _CountSymbols:
    """Counts the symbols of a part."""

    level: Level

    def __call__(self, part: TextPart, number: int, folder: WorkFolder, /) -> PartResult:
        counter = SymbolCounter(self.level)
        for span in part.texts.read_spans(part.start, part.stop):
            span.check_utf8()
            counter.update(split_symbols(span.text, self.level))
        return {"files": [counter.write(folder, counts_name(number))]}


@dataclass(frozen=True)
class _WriteTokens:
    """Writes the tokens of a part."""

    vocabulary: SavedVocabulary

    def __call__(self, part: TextPart, number: int, folder: WorkFolder, /) -> PartResult:
        vocabulary = self.vocabulary.open(folder)
        dtype = token_dtype(len(vocabulary))
        # All but bytes are decoded from UTF-8. Subwords may cross the end of a word, but not that of a line.
        is_decoded, by_line = vocabulary.level != "byte", vocabulary.level == "subword"
        unknown, num_unknown = vocabulary.unknown_token, 0
        with folder.open_writer(part_name("", number, "tokens")) as writer:
            for span in part.texts.read_spans(part.start, part.stop, by_line=by_line):
                if is_decoded:
                    span.check_utf8()
                tokens = vocabulary.encode(span.text)
                writer.append(tokens.astype(dtype))
                num_unknown += 0 if unknown is None else int((tokens == unknown).sum())
            file = writer.finish()
        num_tokens = file.num_bytes // dtype.itemsize
        return {"files": [file_record(file)], "num_tokens": num_tokens, "num_unknown": num_unknown}
