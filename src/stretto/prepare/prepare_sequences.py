"""Prepare sequences: records into a store, one record one sequence of text, tokens or channels."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stretto.base.errors import DataError
from stretto.prepare.parts import PART_BYTES, Job, OnProgress, Record, open_job
from stretto.prepare.prepare import check_hold_out, check_level, most_frequent
from stretto.prepare.records import RecordPart, cut_records, read_rows
from stretto.prepare.rows import (
    BadRow,
    BadRowPolicy,
    BadRows,
    NanPolicy,
    OnSkipped,
    Reading,
    Skipped,
    What,
    check_policies,
    decide,
    record_of,
    sort_names,
    warn_of_skipped,
)
from stretto.prepare.shards import channels_of, check_sides, finish_part, open_shards, skipped_rows, write_store
from stretto.store.like import Like
from stretto.store.sequences import VALUES, Channels, Classes, Origin, Sequences, Tokens
from stretto.store.vocabulary import ByteVocabulary, Level, Vocabulary, split_symbols, token_dtype, vocabulary_bytes


def prepare_sequences(
    files: Sequence[Path | str] | Path | str,
    folder: Path | str,
    *,
    sequence: str | None = None,
    label: str | None = None,
    read_as: What | None = None,
    level: Level | None = None,
    vocabulary: Vocabulary | None = None,
    max_symbols: int | None = None,
    num_tokens: int | None = None,
    like: Path | str | Like | None = None,
    hold_out: float = 0.0,
    seed: int = 0,
    bad_rows: BadRowPolicy = "refuse",
    nan: NanPolicy = "refuse",
    shard_bytes: int = PART_BYTES,
    workers: int | None = None,
    on_progress: OnProgress = lambda progress: None,
    on_skipped: OnSkipped = warn_of_skipped,
) -> list[Sequences]:
    """Write the sequences of some JSONL, CSV or Parquet files, or saved Hugging Face datasets, to `folder`.

    `sequence` names the field: `text`, `tokens` or `values`, if nothing else is said. Text becomes tokens as `level`
    has it; a list of whole numbers is tokens; other numbers, or lists of them, are channels, where null is a missing
    value. `read_as` says which it is where the first record doesn't. `label` names a field of classes.
    With `hold_out`, sequences are drawn for `folder/valid`, the others go to `folder/train`, which the vocabulary and
    the statistics are of. `like` is a prepared folder to take all of these from.
    """
    check_policies(bad_rows, nan)
    check_hold_out(hold_out)
    parts = cut_records(files, shard_bytes)
    model = None if like is None else Like.of(like)
    reading = replace(_find_reading(parts, sequence, read_as, bad_rows), label=label, num_tokens=num_tokens, nan=nan)
    reading, vocabulary = _complete(reading, model, level, vocabulary, max_symbols)
    channels = model.values if model is not None and isinstance(model.values, Channels) else None
    lots = _Lots(("train", "valid") if hold_out else ("",), hold_out, seed)
    recipe = _Recipe(reading, vocabulary, max_symbols, channels, lots, bad_rows)
    paths = list(dict.fromkeys(part.path for part in parts))
    with open_job(folder, paths, recipe.options(parts), workers, on_progress) as job:
        skipped = _write(job, parts, _scan(job, parts, recipe))
        job.finish()
    if skipped.num_rows:
        on_skipped(skipped)
    return [Sequences.open(Path(folder) / side) for side in lots.sides]


@dataclass(frozen=True)
class _Lots:
    """Which side a sequence is drawn for: a function of where it lies, not of who asks or when."""

    sides: tuple[str, ...]
    hold_out: float
    seed: int

    def draw(self, part: int, row: int) -> str:
        if len(self.sides) == 1:
            return self.sides[0]
        digest = hashlib.blake2b(f"{self.seed} {part} {row}".encode(), digest_size=8).digest()
        return self.sides[int.from_bytes(digest, "big") < self.hold_out * 2**64]


@dataclass(frozen=True)
class _Recipe:
    """All that decides what becomes of a record."""

    reading: Reading
    vocabulary: Vocabulary | None
    max_symbols: int | None
    channels: Channels | None  # taken by `like`
    lots: _Lots
    bad_rows: BadRowPolicy

    def options(self, parts: Sequence[RecordPart]) -> dict[str, Any]:
        """Return what tells this preparation from another, beside the state of its files."""
        return {
            "what": "sequences",
            "reading": asdict(self.reading),
            "vocabulary": None if self.vocabulary is None else vocabulary_bytes(self.vocabulary).decode(),
            "max_symbols": self.max_symbols,
            "channels": None if self.channels is None else self.channels.model_dump(mode="json"),
            "lots": asdict(self.lots),
            "bad_rows": self.bad_rows,
            # A file may be named twice, and then it is so many more parts.
            "parts": [(str(part.path), part.start, part.stop, part.size) for part in parts],
        }

    @property
    def num_tokens(self) -> int:
        if self.vocabulary is not None:
            return len(self.vocabulary)
        assert self.reading.num_tokens is not None, "found by the scan"
        return self.reading.num_tokens


def _find_reading(
    parts: Sequence[RecordPart], sequence: str | None, what: What | None, policy: BadRowPolicy
) -> Reading:
    """Return how the records are to be read: as the first one is that can be."""
    if what not in (None, "text", "tokens", "channels"):
        raise DataError(f"--read-as={what!r} is not text, tokens or channels; use one of these")
    first = ""
    for part in parts:
        bad = BadRows(part, policy)
        for row in read_rows(part):
            try:
                return decide(record_of(row), part.format == "csv", sequence, what)
            except BadRow as error:
                bad.meet(row.place, error)
        first = first or bad.first
    raise DataError(f"no row can be read as a sequence (the first is {first}); give other files or options")


def _complete(
    reading: Reading,
    model: Like | None,
    level: Level | None,
    vocabulary: Vocabulary | None,
    max_symbols: int | None,
) -> tuple[Reading, Vocabulary | None]:
    """Add what is known before any record is read; refuse what contradicts it."""
    for name, value in (("level", level), ("vocabulary", vocabulary), ("max-symbols", max_symbols)):
        if value is not None and (reading.what != "text" or (model is not None and name != "level")):
            other = f"sequences of {reading.what}" if reading.what != "text" else "a vocabulary taken by --like"
            raise DataError(f"--{name} has no meaning for {other}; leave it out")
    if reading.num_tokens is not None and (reading.what != "tokens" or model is not None):
        other = "a number taken by --like" if reading.what == "tokens" else f"sequences of {reading.what}"
        raise DataError(f"--num-tokens={reading.num_tokens} has no meaning for {other}; leave it out")
    if reading.num_tokens is not None and not 1 <= reading.num_tokens <= 2**32:
        raise DataError(f"--num-tokens={reading.num_tokens} must be between 1 and 2^32")
    if model is not None:
        reading = _like(reading, model)
        vocabulary = model.vocabulary
    if reading.what != "text":
        return reading, vocabulary
    level = check_level(level, vocabulary, max_symbols)
    if level == "byte":
        vocabulary = ByteVocabulary()
    return replace(reading, level=level), vocabulary


def _like(reading: Reading, model: Like) -> Reading:
    values, labels = model.values, model.labels
    there = "text" if model.vocabulary is not None else values.type
    if there != reading.what:
        raise DataError(
            f"--like={model.location} has {there}, but {reading.sequence!r} holds {reading.what}; give another"
        )
    if isinstance(values, Channels) and len(values.names) != (reading.num_channels or 1):
        raise DataError(
            f"--like={model.location} has {len(values.names)} channels, but {reading.sequence!r} has "
            f"{reading.num_channels or 1}; give another"
        )
    if reading.label is not None and labels is None:
        raise DataError(f"--like={model.location} has no labels; leave --label {reading.label} out")
    return replace(
        reading,
        num_tokens=values.num_tokens if isinstance(values, Tokens) else None,
        classes=None if labels is None or reading.label is None else _numbered(labels.names),
    )


def _numbered(names: Sequence[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


def _scan(job: Job, parts: Sequence[RecordPart], recipe: _Recipe) -> _Recipe:
    """Read all once for what must be known before anything is written: symbols, the largest token, the classes."""
    reading, vocabulary = recipe.reading, recipe.vocabulary
    is_text = reading.what == "text"
    is_known = vocabulary is not None if is_text else reading.num_tokens is not None or reading.what == "channels"
    if is_known and (reading.label is None or reading.classes is not None):
        return recipe
    said = f"counting {reading.level}s" if not is_known and is_text else "reading ahead"
    work = _ScanPart(recipe, not is_known)
    counts: Counter[str] = Counter()
    names: set[str] = set()
    largest, bad = -1, {}
    for number, record in job.each("scan", work, parts, [part.size for part in parts], said):
        counts.update(record["counts"])
        names.update(record["labels"])
        largest = max(largest, record["largest"])
        if not record["num_rows"]:
            bad[number] = record["bad"]
    if len(bad) == len(parts):
        first = next((bad[number] for number in sorted(bad) if bad[number]), "")
        raise DataError(f"no sequence is left for {job.target}, all rows are bad ({first}); give other files")
    if not is_known and is_text:
        vocabulary = most_frequent(counts, reading.level, recipe.max_symbols)
    elif not is_known:
        reading = replace(reading, num_tokens=largest + 1)
    if reading.label is not None and reading.classes is None:
        reading = replace(reading, classes=_numbered(sort_names(names)))
    return replace(recipe, reading=reading, vocabulary=vocabulary)


def _write(job: Job, parts: Sequence[RecordPart], recipe: _Recipe) -> Skipped:
    reading, lots = recipe.reading, recipe.lots
    for side in lots.sides:
        (job.folder / side).mkdir(exist_ok=True)
    records = job.run("write", _WriteSequences(recipe), parts, [part.size for part in parts], f"writing {job.target}")
    check_sides(job, records, lots.sides, lots.hold_out)
    shards = {side: [record["sides"][side] for record in records] for side in lots.sides}
    values: Tokens | Channels
    if reading.what == "channels":
        values = channels_of(_channel_names(reading), shards[lots.sides[0]], recipe.channels)
    else:
        values = Tokens(num_tokens=recipe.num_tokens)
    labels = None if reading.classes is None else Classes(names=tuple(reading.classes))
    for side in lots.sides:
        origin = Origin(sequence=reading.sequence, label=reading.label)
        write_store(job, side, shards[side], values, labels, recipe.vocabulary, origin)
    return skipped_rows(records)


def _channel_names(reading: Reading) -> list[str]:
    if reading.num_channels is None:
        return [reading.sequence]
    return [f"{reading.sequence}.{number}" for number in range(reading.num_channels)]


def _good_rows(part: RecordPart, reading: Reading, bad: BadRows) -> Iterator[tuple[int, Any, str | None]]:
    """Return the number in the part, the sequence and the label of each row that has them."""
    for row in read_rows(part, reading.fields):
        try:
            record = record_of(row)
            value = reading.text(record) if reading.what == "text" else reading.steps(record, part.format == "csv")
            yield row.place, value, reading.label_name(record)
        except BadRow as error:
            bad.meet(row.place, error)


@dataclass(frozen=True)
class _ScanPart:
    """See what there is in a part."""

    recipe: _Recipe
    is_counted: bool

    def __call__(self, part: RecordPart, number: int, folder: Path, /) -> Record:
        reading, bad = self.recipe.reading, BadRows(part, self.recipe.bad_rows)
        counts: Counter[str] = Counter()
        labels: set[str] = set()
        largest, num_rows = -1, 0
        for place, value, label in _good_rows(part, reading, bad):
            num_rows += 1
            if label is not None:
                labels.add(label)
            if not self.is_counted:
                continue
            if reading.what == "tokens":
                largest = max(largest, int(value.max()))
            # As for a corpus, the vocabulary is that of the training part.
            elif self.recipe.lots.draw(number, place) != "valid":
                counts.update(split_symbols(value, reading.level))
        return {
            "counts": dict(counts),
            "largest": largest,
            "labels": sorted(labels),
            "num_rows": num_rows,
            "bad": bad.first,
        }


@dataclass(frozen=True)
class _WriteSequences:
    """Write the sequences of a part, each to its side."""

    recipe: _Recipe

    def __call__(self, part: RecordPart, number: int, folder: Path, /) -> Record:
        reading, vocabulary, lots = self.recipe.reading, self.recipe.vocabulary, self.recipe.lots
        classes: Mapping[str, int] = reading.classes or {}
        dtype: np.dtype[Any] = VALUES if reading.what == "channels" else token_dtype(self.recipe.num_tokens)
        bad = BadRows(part, self.recipe.bad_rows)
        with open_shards(folder, lots.sides, number, dtype, reading.label is not None) as writers:
            for place, value, label in _good_rows(part, reading, bad):
                writer = writers[lots.draw(number, place)]
                class_number = None if label is None else classes[label]
                if vocabulary is None:
                    writer.append(value, class_number)
                else:
                    writer.append(vocabulary.encode(value), class_number, len(value.encode()))
            return finish_part(writers, bad)
