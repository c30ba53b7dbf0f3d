"""prepare_sequences: turns records into a store; each record is one sequence of text, tokens or channels."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from stretto.base.errors import DataError
from stretto.base.fingerprint import fingerprint
from stretto.prepare.field_check import check_fields
from stretto.prepare.options import SequenceOptions, check_level, open_like, open_vocabulary
from stretto.prepare.prepare_job import Job, OnProgress, PartResult, open_job
from stretto.prepare.record_parser import RecordParser, infer_parser, sort_class_names
from stretto.prepare.records import RecordPart, cut_records, list_paths
from stretto.prepare.row_reader import OnSkipped, RowReader, SkippedRows, log_skipped_rows
from stretto.prepare.shard_writer import finish_part, make_channels, open_shards, write_parts, write_store
from stretto.store.sequences import CHANNEL_DTYPE, Channels, Classes, Origin, Sequences, SharedProperties, Tokens
from stretto.store.vocabulary import (
    ByteVocabulary,
    SymbolVocabulary,
    Vocabulary,
    split_symbols,
    token_dtype,
    vocabulary_bytes,
)


def prepare_sequences(
    files: Sequence[Path | str] | Path | str,
    folder: Path | str,
    options: SequenceOptions = SequenceOptions(),
    *,
    workers: int | None = None,
    on_progress: OnProgress = lambda progress: None,
    on_skipped: OnSkipped = log_skipped_rows,
) -> list[Sequences]:
    """Write the records of files, or of saved Hugging Face datasets, as sequences to `folder`.

    Files are JSONL, CSV or Parquet, or `.npz` or `.npy`, in which a record is a row of the arrays. Each record is one
    sequence, in the field `options.sequence`. Text becomes tokens: bytes, characters or words (`level`). Unless
    `read_as` is set, lists of integers are tokens, but channels in a field named `values`. Lists of other numbers and
    lists of lists are channels, with null for a missing value. With `validation_fraction`, sequences are drawn at
    random for `folder/valid`; the others go to `folder/train`. Vocabulary and statistics come from the training split,
    unless `vocabulary` or `like` names other prepared data. Returns each split's sequences.
    """
    paths = list_paths(files)
    parts = cut_records(paths, options.shard_bytes)
    shared = open_like(options.like)
    if options.bad_rows == "error":
        check_fields(parts, [("sequence", options.sequence), ("label", options.label)])
    parser = replace(_first_parser(parts, options), label=options.label, num_tokens=options.num_tokens, nan=options.nan)
    parser, vocabulary = _complete_parser(parser, shared, options)
    channels = shared.values if shared is not None and isinstance(shared.values, Channels) else None
    settings = _SequenceSettings(options, parser, vocabulary, channels)
    # `paths` keeps a path that is given twice: its records are written twice, and the fingerprint includes it twice.
    with open_job(folder, paths, options.to_dict(), workers, on_progress) as job:
        skipped = _write(job, parts, _scan(job, parts, settings))
        job.finish()
    if skipped.num_rows:
        on_skipped(skipped)
    return [Sequences.open(Path(folder) / split) for split in settings.splits]


@dataclass(frozen=True)
class _SequenceSettings:
    """Everything that decides how a record is written: the options, and what follows from the files and `like`."""

    options: SequenceOptions
    parser: RecordParser
    vocabulary: Vocabulary | None
    channels: Channels | None  # from `like`

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train", "valid") if self.options.validation_fraction else ("",)

    @property
    def learned(self) -> str:
        """A fingerprint of what follows from the files: from the first record, and from the scan of all of them."""
        symbols = None if self.vocabulary is None else vocabulary_bytes(self.vocabulary).decode()
        return fingerprint([repr(self.parser), symbols])

    @property
    def num_tokens(self) -> int:
        """The vocabulary size."""
        if self.vocabulary is not None:
            return len(self.vocabulary)
        assert self.parser.num_tokens is not None, "set by the scan"
        return self.parser.num_tokens

    def choose_split(self, part: int, row: int) -> str:
        """Return the split of a sequence: a pure function of the seed, the part and the row, so all passes agree."""
        if not self.options.validation_fraction:
            return ""
        digest = hashlib.blake2b(f"{self.options.seed} {part} {row}".encode(), digest_size=8).digest()
        return "valid" if int.from_bytes(digest, "big") < self.options.validation_fraction * 2**64 else "train"


def _first_parser(parts: Sequence[RecordPart], options: SequenceOptions) -> RecordParser:
    """Return a parser for the records, inferred from the first one that can be read."""
    first_bad = ""
    for part in parts:
        reader = RowReader(part, options.bad_rows)
        is_csv = part.format == "csv"
        parse = partial(infer_parser, is_csv=is_csv, sequence=options.sequence, value_type=options.read_as)
        for _, parser in reader.read(parse):
            return parser
        first_bad = first_bad or reader.first_bad
    first = f" (the first is {first_bad})" if first_bad else ""
    raise DataError(f"no row can be read as a sequence{first}; use different files or options")


def _complete_parser(
    parser: RecordParser, shared: SharedProperties | None, options: SequenceOptions
) -> tuple[RecordParser, Vocabulary | None]:
    """Return the parser, completed from `options` and `like`, and the vocabulary if known; reject contradictions."""
    _check_token_options(parser, shared, options)
    vocabulary = open_vocabulary(options.vocabulary)
    if shared is not None:
        parser = _apply_shared(parser, shared)
        vocabulary = shared.vocabulary
    if parser.value_type != "text":
        return parser, vocabulary
    level = check_level(options.level, vocabulary, options.max_symbols)
    return replace(parser, level=level), ByteVocabulary() if level == "byte" else vocabulary


def _check_token_options(parser: RecordParser, shared: SharedProperties | None, options: SequenceOptions) -> None:
    """Reject token options that don't apply to this type of sequence, or that `like` already determines."""
    for name in ("level", "vocabulary", "max_symbols", "num_tokens"):
        value = getattr(options, name)
        if value is not None and parser.value_type != ("tokens" if name == "num_tokens" else "text"):
            raise DataError(f"{name}={value} has no effect on sequences of {parser.value_type}; leave it out")
        if value is not None and shared is not None and name != "level":
            fixed = "tokens" if name == "num_tokens" else "vocabulary"
            raise DataError(f"{name}={value} has no effect on the {fixed} of like={shared.location}; leave it out")
    if options.num_tokens is not None and not 1 <= options.num_tokens <= 2**32:
        raise DataError(f"num_tokens={options.num_tokens} must be between 1 and 2^32")


def _apply_shared(parser: RecordParser, shared: SharedProperties) -> RecordParser:
    """Return the parser with the vocabulary size and the classes of `shared`; reject records that don't match it."""
    values, labels = shared.values, shared.labels
    value_type = "text" if shared.vocabulary is not None else values.type
    if value_type != parser.value_type:
        raise DataError(
            f"like={shared.location} has {value_type}, but {parser.sequence!r} holds {parser.value_type}; "
            "use different data"
        )
    if isinstance(values, Channels) and len(values.names) != (num_channels := parser.num_channels or 1):
        problem = f"like={shared.location} and {parser.sequence!r} differ in the number of channels"
        raise DataError(f"{problem} ({len(values.names)} and {num_channels}); use different data")
    if parser.label is not None and labels is None:
        raise DataError(f"like={shared.location} has no labels; leave label={parser.label} out")
    return replace(
        parser,
        num_tokens=values.num_tokens if isinstance(values, Tokens) else None,
        classes=None if labels is None or parser.label is None else _numbered(labels.names),
    )


def _numbered(names: Sequence[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


def _scan(job: Job, parts: Sequence[RecordPart], settings: _SequenceSettings) -> _SequenceSettings:
    """Return settings with the vocabulary, or its size, and the classes; read all records if any of them is unknown."""
    parser, vocabulary = settings.parser, settings.vocabulary
    is_text = parser.value_type == "text"
    needs_vocabulary = vocabulary is None if is_text else parser.value_type == "tokens" and parser.num_tokens is None
    if not needs_vocabulary and (parser.label is None or parser.classes is not None):
        return settings
    phase = f"counting {parser.level}s" if needs_vocabulary and is_text else "scanning records"
    task = _ScanPart(settings, needs_vocabulary)
    counts: Counter[str] = Counter()
    names: set[str] = set()
    largest, first_bad = -1, {}  # first_bad: the first bad row of each part without a good one
    sizes = [part.size for part in parts]
    for number, result in job.run_unordered("scan", task, parts, sizes, phase, settings.learned):
        counts.update(result["counts"])
        names.update(result["labels"])
        largest = max(largest, result["largest"])
        if not result["num_rows"]:
            first_bad[number] = result["first_bad"]
    if len(first_bad) == len(parts):
        first = next((first_bad[number] for number in range(len(parts)) if first_bad[number]), "")
        raise DataError(f"{job.target} would be empty: all rows are bad (the first is {first}); use different files")
    if needs_vocabulary and is_text:
        vocabulary = SymbolVocabulary.from_counts(parser.level, counts, settings.options.max_symbols)
    elif needs_vocabulary:
        parser = replace(parser, num_tokens=largest + 1)
    if parser.label is not None and parser.classes is None:
        parser = replace(parser, classes=_numbered(sort_class_names(names)))
    return replace(settings, parser=parser, vocabulary=vocabulary)


def _write(job: Job, parts: Sequence[RecordPart], settings: _SequenceSettings) -> SkippedRows:
    parser, splits, fraction = settings.parser, settings.splits, settings.options.validation_fraction
    shards, skipped = write_parts(job, _WriteSequences(settings), parts, splits, fraction, settings.learned)
    values: Tokens | Channels
    if parser.value_type == "channels":
        values = make_channels(parser.channel_names, shards[splits[0]], settings.channels)  # training statistics
    else:
        values = Tokens(num_tokens=settings.num_tokens)
    labels = None if parser.classes is None else Classes(names=tuple(parser.classes))
    origin = Origin(sequence=parser.sequence, label=parser.label)
    for split in splits:
        write_store(job, split, shards[split], values, labels, settings.vocabulary, origin)
    return skipped


@dataclass(frozen=True)
class _ScanPart:
    """Finds the labels of a part, and its symbols or its largest token."""

    settings: _SequenceSettings
    needs_vocabulary: bool  # for tokens, only its size

    def __call__(self, part: RecordPart, number: int, folder: Path, /) -> PartResult:
        parser, reader = self.settings.parser, RowReader(part, self.settings.options.bad_rows)
        counts: Counter[str] = Counter()
        labels: set[str] = set()
        largest, num_rows = -1, 0
        for row_index, (value, label) in reader.read(partial(parser.parse, is_csv=part.format == "csv"), parser.fields):
            num_rows += 1
            if label is not None:
                labels.add(label)
            if not self.needs_vocabulary:
                continue
            if parser.value_type == "tokens":
                largest = max(largest, int(value.max()))
            # As for a corpus, the vocabulary is built from the training split.
            elif self.settings.choose_split(number, row_index) != "valid":
                counts.update(split_symbols(value, parser.level))
        token_stats = {"counts": dict(counts), "largest": largest}
        return {**token_stats, "labels": sorted(labels), "num_rows": num_rows, "first_bad": reader.first_bad}


@dataclass(frozen=True)
class _WriteSequences:
    """Writes the sequences of a part, each to its split."""

    settings: _SequenceSettings

    def __call__(self, part: RecordPart, number: int, folder: Path, /) -> PartResult:
        settings, parser, vocabulary = self.settings, self.settings.parser, self.settings.vocabulary
        classes: Mapping[str, int] = parser.classes or {}
        dtype: np.dtype[Any] = CHANNEL_DTYPE if parser.value_type == "channels" else token_dtype(settings.num_tokens)
        reader = RowReader(part, settings.options.bad_rows)
        rows = reader.read(partial(parser.parse, is_csv=part.format == "csv"), parser.fields)
        with open_shards(folder, settings.splits, number, dtype, parser.label is not None) as writers:
            for row_index, (value, label) in rows:
                writer = writers[settings.choose_split(number, row_index)]
                class_number = None if label is None else classes[label]
                if vocabulary is None:
                    writer.append(value, class_number)
                else:
                    writer.append(vocabulary.encode(value), class_number, len(value.encode()))
            return finish_part(writers, reader)
