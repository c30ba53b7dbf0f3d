"""Prepare sequences: records into a store, one record one sequence of text, tokens or channels."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stretto.base.errors import DataError
from stretto.prepare.prepare_job import PART_BYTES, Job, OnProgress, PartResult, open_job
from stretto.prepare.prepare_text import check_level, check_validation_fraction, most_frequent
from stretto.prepare.record_parser import (
    BadRowError,
    BadRowPolicy,
    BadRows,
    NanPolicy,
    OnSkipped,
    RecordParser,
    SkippedRows,
    ValueType,
    check_policies,
    get_record,
    infer_parser,
    log_skipped_rows,
    sort_names,
)
from stretto.prepare.records import RecordPart, cut_records, read_rows
from stretto.prepare.shard_writer import (
    check_splits,
    finish_part,
    make_channels,
    open_shards,
    sum_skipped_rows,
    write_store,
)
from stretto.store.schema import Schema
from stretto.store.sequences import VALUES, Channels, Classes, Origin, Sequences, Tokens
from stretto.store.vocabulary import ByteVocabulary, Level, Vocabulary, split_symbols, token_dtype, vocabulary_bytes


def prepare_sequences(
    files: Sequence[Path | str] | Path | str,
    folder: Path | str,
    *,
    sequence: str | None = None,
    label: str | None = None,
    read_as: ValueType | None = None,
    level: Level | None = None,
    vocabulary: Vocabulary | None = None,
    max_symbols: int | None = None,
    num_tokens: int | None = None,
    like: Path | str | Schema | None = None,
    validation_fraction: float = 0.0,
    seed: int = 0,
    bad_rows: BadRowPolicy = "refuse",
    nan: NanPolicy = "refuse",
    shard_bytes: int = PART_BYTES,
    workers: int | None = None,
    on_progress: OnProgress = lambda progress: None,
    on_skipped: OnSkipped = log_skipped_rows,
) -> list[Sequences]:
    """Write the sequences of some JSONL, CSV or Parquet files, or saved Hugging Face datasets, to `folder`.

    `sequence` names the field: `text`, `tokens` or `values`, if nothing else is said. Text becomes tokens as `level`
    has it; a list of whole numbers is tokens; other numbers, or lists of them, are channels, where null is a missing
    value. `read_as` says which it is where the first record doesn't. `label` names a field of classes.
    With `validation_fraction`, sequences are drawn for `folder/valid`, the others go to `folder/train`, which the vocabulary and
    the statistics are of. `like` is a prepared folder to take all of these from.
    """
    check_policies(bad_rows, nan)
    check_validation_fraction(validation_fraction)
    parts = cut_records(files, shard_bytes)
    model = None if like is None else Schema.from_location(like)
    parser = replace(_infer_parser(parts, sequence, read_as, bad_rows), label=label, num_tokens=num_tokens, nan=nan)
    parser, vocabulary = _complete(parser, model, level, vocabulary, max_symbols)
    channels = model.values if model is not None and isinstance(model.values, Channels) else None
    random_split = _RandomSplit(("train", "valid") if validation_fraction else ("",), validation_fraction, seed)
    settings = _SequenceSettings(parser, vocabulary, max_symbols, channels, random_split, bad_rows)
    paths = list(dict.fromkeys(part.path for part in parts))
    with open_job(folder, paths, settings.options(parts), workers, on_progress) as job:
        skipped = _write(job, parts, _scan(job, parts, settings))
        job.finish()
    if skipped.num_rows:
        on_skipped(skipped)
    return [Sequences.open(Path(folder) / split) for split in random_split.splits]


@dataclass(frozen=True)
class _RandomSplit:
    """Which split a sequence is drawn for: a function of where it lies, not of who asks or when."""

    splits: tuple[str, ...]
    validation_fraction: float
    seed: int

    def assign(self, part: int, row: int) -> str:
        if len(self.splits) == 1:
            return self.splits[0]
        digest = hashlib.blake2b(f"{self.seed} {part} {row}".encode(), digest_size=8).digest()
        return self.splits[int.from_bytes(digest, "big") < self.validation_fraction * 2**64]


@dataclass(frozen=True)
class _SequenceSettings:
    """All that decides what becomes of a record."""

    parser: RecordParser
    vocabulary: Vocabulary | None
    max_symbols: int | None
    channels: Channels | None  # taken by `like`
    random_split: _RandomSplit
    bad_rows: BadRowPolicy

    def options(self, parts: Sequence[RecordPart]) -> dict[str, Any]:
        """Return what tells this preparation from another, beside the state of its files."""
        return {
            "what": "sequences",
            "parser": asdict(self.parser),
            "vocabulary": None if self.vocabulary is None else vocabulary_bytes(self.vocabulary).decode(),
            "max_symbols": self.max_symbols,
            "channels": None if self.channels is None else self.channels.model_dump(mode="json"),
            "random_split": asdict(self.random_split),
            "bad_rows": self.bad_rows,
            # A file may be named twice, and then it is so many more parts.
            "parts": [(str(part.path), part.start, part.stop, part.size) for part in parts],
        }

    @property
    def num_tokens(self) -> int:
        if self.vocabulary is not None:
            return len(self.vocabulary)
        assert self.parser.num_tokens is not None, "found by the scan"
        return self.parser.num_tokens


def _infer_parser(
    parts: Sequence[RecordPart], sequence: str | None, value_type: ValueType | None, policy: BadRowPolicy
) -> RecordParser:
    """Return how the records are to be read: as the first one is that can be."""
    if value_type not in (None, "text", "tokens", "channels"):
        raise DataError(f"--read-as={value_type!r} is not text, tokens or channels; use one of these")
    first = ""
    for part in parts:
        bad = BadRows(part, policy)
        for row in read_rows(part):
            try:
                return infer_parser(get_record(row), part.format == "csv", sequence, value_type)
            except BadRowError as error:
                bad.add(row.row_index, error)
        first = first or bad.first
    raise DataError(f"no row can be read as a sequence (the first is {first}); give other files or options")


def _complete(
    parser: RecordParser,
    model: Schema | None,
    level: Level | None,
    vocabulary: Vocabulary | None,
    max_symbols: int | None,
) -> tuple[RecordParser, Vocabulary | None]:
    """Add what is known before any record is read; refuse what contradicts it."""
    for name, value in (("level", level), ("vocabulary", vocabulary), ("max-symbols", max_symbols)):
        if value is not None and (parser.value_type != "text" or (model is not None and name != "level")):
            other = (
                f"sequences of {parser.value_type}" if parser.value_type != "text" else "a vocabulary taken by --like"
            )
            raise DataError(f"--{name} has no meaning for {other}; leave it out")
    if parser.num_tokens is not None and (parser.value_type != "tokens" or model is not None):
        other = "a number taken by --like" if parser.value_type == "tokens" else f"sequences of {parser.value_type}"
        raise DataError(f"--num-tokens={parser.num_tokens} has no meaning for {other}; leave it out")
    if parser.num_tokens is not None and not 1 <= parser.num_tokens <= 2**32:
        raise DataError(f"--num-tokens={parser.num_tokens} must be between 1 and 2^32")
    if model is not None:
        parser = _apply_schema(parser, model)
        vocabulary = model.vocabulary
    if parser.value_type != "text":
        return parser, vocabulary
    level = check_level(level, vocabulary, max_symbols)
    if level == "byte":
        vocabulary = ByteVocabulary()
    return replace(parser, level=level), vocabulary


def _apply_schema(parser: RecordParser, model: Schema) -> RecordParser:
    values, labels = model.values, model.labels
    there = "text" if model.vocabulary is not None else values.type
    if there != parser.value_type:
        raise DataError(
            f"--like={model.location} has {there}, but {parser.sequence!r} holds {parser.value_type}; give another"
        )
    if isinstance(values, Channels) and len(values.names) != (parser.num_channels or 1):
        raise DataError(
            f"--like={model.location} has {len(values.names)} channels, but {parser.sequence!r} has "
            f"{parser.num_channels or 1}; give another"
        )
    if parser.label is not None and labels is None:
        raise DataError(f"--like={model.location} has no labels; leave --label {parser.label} out")
    return replace(
        parser,
        num_tokens=values.num_tokens if isinstance(values, Tokens) else None,
        classes=None if labels is None or parser.label is None else _numbered(labels.names),
    )


def _numbered(names: Sequence[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


def _scan(job: Job, parts: Sequence[RecordPart], settings: _SequenceSettings) -> _SequenceSettings:
    """Read all once for what must be known before anything is written: symbols, the largest token, the classes."""
    parser, vocabulary = settings.parser, settings.vocabulary
    is_text = parser.value_type == "text"
    is_known = vocabulary is not None if is_text else parser.num_tokens is not None or parser.value_type == "channels"
    if is_known and (parser.label is None or parser.classes is not None):
        return settings
    description = f"counting {parser.level}s" if not is_known and is_text else "parser ahead"
    task = _ScanPart(settings, not is_known)
    counts: Counter[str] = Counter()
    names: set[str] = set()
    largest, bad = -1, {}
    for number, record in job.run_unordered("scan", task, parts, [part.size for part in parts], description):
        counts.update(record["counts"])
        names.update(record["labels"])
        largest = max(largest, record["largest"])
        if not record["num_rows"]:
            bad[number] = record["bad"]
    if len(bad) == len(parts):
        first = next((bad[number] for number in sorted(bad) if bad[number]), "")
        raise DataError(f"no sequence is left for {job.target}, all rows are bad ({first}); give other files")
    if not is_known and is_text:
        vocabulary = most_frequent(counts, parser.level, settings.max_symbols)
    elif not is_known:
        parser = replace(parser, num_tokens=largest + 1)
    if parser.label is not None and parser.classes is None:
        parser = replace(parser, classes=_numbered(sort_names(names)))
    return replace(settings, parser=parser, vocabulary=vocabulary)


def _write(job: Job, parts: Sequence[RecordPart], settings: _SequenceSettings) -> SkippedRows:
    parser, random_split = settings.parser, settings.random_split
    for split in random_split.splits:
        (job.folder / split).mkdir(exist_ok=True)
    records = job.run("write", _WriteSequences(settings), parts, [part.size for part in parts], f"writing {job.target}")
    check_splits(job, records, random_split.splits, random_split.validation_fraction)
    shards = {split: [record["splits"][split] for record in records] for split in random_split.splits}
    values: Tokens | Channels
    if parser.value_type == "channels":
        values = make_channels(_channel_names(parser), shards[random_split.splits[0]], settings.channels)
    else:
        values = Tokens(num_tokens=settings.num_tokens)
    labels = None if parser.classes is None else Classes(names=tuple(parser.classes))
    for split in random_split.splits:
        origin = Origin(sequence=parser.sequence, label=parser.label)
        write_store(job, split, shards[split], values, labels, settings.vocabulary, origin)
    return sum_skipped_rows(records)


def _channel_names(parser: RecordParser) -> list[str]:
    if parser.num_channels is None:
        return [parser.sequence]
    return [f"{parser.sequence}.{number}" for number in range(parser.num_channels)]


def _good_rows(part: RecordPart, parser: RecordParser, bad: BadRows) -> Iterator[tuple[int, Any, str | None]]:
    """Return the number in the part, the sequence and the label of each row that has them."""
    for row in read_rows(part, parser.fields):
        try:
            record = get_record(row)
            value = parser.text(record) if parser.value_type == "text" else parser.steps(record, part.format == "csv")
            yield row.row_index, value, parser.label_name(record)
        except BadRowError as error:
            bad.add(row.row_index, error)


@dataclass(frozen=True)
class _ScanPart:
    """See what there is in a part."""

    settings: _SequenceSettings
    is_counted: bool

    def __call__(self, part: RecordPart, number: int, folder: Path, /) -> PartResult:
        parser, bad = self.settings.parser, BadRows(part, self.settings.bad_rows)
        counts: Counter[str] = Counter()
        labels: set[str] = set()
        largest, num_rows = -1, 0
        for place, value, label in _good_rows(part, parser, bad):
            num_rows += 1
            if label is not None:
                labels.add(label)
            if not self.is_counted:
                continue
            if parser.value_type == "tokens":
                largest = max(largest, int(value.max()))
            # As for a corpus, the vocabulary is that of the training part.
            elif self.settings.random_split.assign(number, place) != "valid":
                counts.update(split_symbols(value, parser.level))
        return {
            "counts": dict(counts),
            "largest": largest,
            "labels": sorted(labels),
            "num_rows": num_rows,
            "bad": bad.first,
        }


@dataclass(frozen=True)
class _WriteSequences:
    """Write the sequences of a part, each to its split."""

    settings: _SequenceSettings

    def __call__(self, part: RecordPart, number: int, folder: Path, /) -> PartResult:
        parser, vocabulary, random_split = self.settings.parser, self.settings.vocabulary, self.settings.random_split
        classes: Mapping[str, int] = parser.classes or {}
        dtype: np.dtype[Any] = VALUES if parser.value_type == "channels" else token_dtype(self.settings.num_tokens)
        bad = BadRows(part, self.settings.bad_rows)
        with open_shards(folder, random_split.splits, number, dtype, parser.label is not None) as writers:
            for place, value, label in _good_rows(part, parser, bad):
                writer = writers[random_split.assign(number, place)]
                class_number = None if label is None else classes[label]
                if vocabulary is None:
                    writer.append(value, class_number)
                else:
                    writer.append(vocabulary.encode(value), class_number, len(value.encode()))
            return finish_part(writers, bad)
