"""Inspect: what some files seem to hold, from their beginnings: text, sequences, or series."""

from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stretto.base.errors import DataError
from stretto.prepare.field_summary import FieldSummary, infer_fields
from stretto.prepare.file_listing import AmbiguousInputError, Format, Listing, list_files, list_validation_files
from stretto.prepare.file_preview import MAX_BYTES, FilePreview, preview_file, read_beginning
from stretto.prepare.record_parser import NanPolicy, parse_number
from stretto.prepare.time_axis import (
    has_many_repeats,
    infer_period,
    is_decreasing_anywhere,
    is_grouped,
    is_row_counter,
    median_interval,
    parse_timestamps,
)
from stretto.store.vocabulary import Level, split_symbols

DataKind = Literal["text", "sequences", "series"]

_SEQUENCE_COLUMNS = ("text", "tokens", "values")
_LABEL_COLUMNS = ("label", "labels", "class", "target", "category", "sentiment", "y")
_TIME_COLUMNS = ("time", "date", "datetime", "timestamp", "ds", "t", "step", "index")
_SERIES_COLUMNS = (
    "id",
    "unique_id",
    "series",
    "series_id",
    "meter",
    "station",
    "sensor",
    "unit",
    "store",
    "item",
    "symbol",
)
_MAX_TIME_CHARS = 40
# Text with more different words than this share of all has too many for a vocabulary of words.
_MAX_UNIQUE_FRACTION = 0.5
_MAX_WORD_CHARS = 15


@dataclass(frozen=True)
class Inspection:
    """What some files hold, as far as their beginnings tell, and how they can be read."""

    kind: DataKind
    format: Format
    paths: tuple[Path, ...]
    valid: tuple[Path, ...] = ()  # files that are held out, as it was said or by their names
    num_bytes: int = 0
    num_rows: int | None = None  # about; of text, none
    fields: tuple[FieldSummary, ...] = ()
    # Of text, also that of sequences.
    level: Level | None = None
    is_utf8: bool = True
    # Of sequences.
    sequence: str | None = None
    label: str | None = None
    labels: tuple[str, ...] = ()  # other fields that could be the label
    # Of series.
    time: str | None = None
    by: str | None = None
    columns: tuple[str, ...] = ()
    seconds: float | None = None  # between two rows
    period: int = 0  # rows after which values repeat themselves, such as 24 of hours
    nan: NanPolicy = "refuse"
    has_missing: bool = False
    notes: tuple[str, ...] = ()  # what was decided and could be otherwise, a sentence each

    @property
    def sequence_type(self) -> str | None:
        """What the sequences are made of: text, tokens or channels."""
        found = next((field.type for field in self.fields if field.name == self.sequence), None)
        return "text" if found in ("names", "dates") else found


def inspect_data(
    paths: Sequence[Path | str] | Path | str,
    *,
    valid: Sequence[Path | str] = (),
    kind: DataKind | None = None,
    format: str | None = None,
    level: Level | None = None,
    sequence: str | None = None,
    label: str | None = None,
    is_labeled: bool = True,
    time: str | None = None,
    by: str | None = None,
) -> Inspection:
    """Return what files or folders hold; only the beginning and the end of a file is looked at.

    What is said here is not guessed. `valid` are files to hold out, whatever others are called. `is_labeled=False`
    leaves labels alone. Where it can't be told, an AmbiguousInputError says what to ask.
    """
    listing = list_files([Path(path) for path in ([paths] if isinstance(paths, Path | str) else paths)], format)
    if kind not in (None, "text", "sequences", "series"):
        raise DataError(f"--kind={kind!r} is not text, sequences or series; use one of these")
    is_text = listing.format == "text" or kind == "text"
    if held_out := list_validation_files(map(Path, valid), listing.format, is_text):
        listing = replace(listing, valid=held_out, ignored=(*listing.ignored, *listing.valid), is_explicit=True)
    if is_text:
        if kind not in (None, "text"):
            raise DataError(f"--kind={kind} needs records, and {listing.paths[0]} is text; give JSONL, CSV or Parquet")
        return _add_notes(_find_text(listing, level), listing)
    head = preview_file(listing.paths[0])
    records = [row.record for row in head.rows if not row.problem]
    if not records:
        raise DataError(f"{listing.paths[0]}: no row can be read (the first: {head.rows[0].problem}); mend it")
    shown = replace(
        Inspection("sequences", listing.format, listing.paths, listing.valid, listing.num_bytes),
        fields=_infer_fields(head, records),
        num_rows=_count_rows(listing, head),
    )
    for option, name in (("sequence", sequence), ("label", label), ("time", time), ("by", by)):
        if name is not None and name not in (found.name for found in shown.fields):
            names = ", ".join(found.name for found in shown.fields)
            raise DataError(f"--{option}={name} is not in {listing.paths[0]}; its fields are {names}")
    if (kind or _infer_kind(shown, sequence or label, time or by)) == "series":
        return _add_notes(_find_series(shown, head, records, time, by), listing)
    return _add_notes(_find_sequences(shown, records, sequence, label, is_labeled, level), listing)


def _infer_fields(head: FilePreview, records: Sequence[Mapping[str, Any]]) -> tuple[FieldSummary, ...]:
    """Return what the fields hold; the last rows say what else they hold, since a file may be sorted by its classes."""
    last = [row.record for row in head.last if not row.problem]
    seen = {field.name: field for field in infer_fields([*records, *last], head.is_csv)}
    # The last rows of a CSV file may be read from within a quoted cell, and then fields seem to hold something else.
    return tuple(
        seen[field.name] if seen[field.name].type == field.type else field
        for field in infer_fields(records, head.is_csv)
    )


def _add_notes(found: Inspection, listing: Listing) -> Inspection:
    """Say which files are held out or left out."""
    notes = []
    if found.valid and not listing.is_explicit:
        notes.append(f"held out, by their names: {_names(found.valid)}")
    if listing.ignored:
        notes.append(f"left out: {_names(listing.ignored)}")
    return replace(found, notes=(*found.notes, *notes))


def _names(paths: Sequence[Path], most: int = 3) -> str:
    more = f" and {len(paths) - most:,} more" if len(paths) > most else ""
    return ", ".join(path.name for path in paths[:most]) + more


def _count_rows(listing: Listing, head: FilePreview) -> int:
    size = listing.paths[0].stat().st_size if listing.paths[0].is_file() else 0
    return head.num_rows * len(listing.paths) if not size else round(head.num_rows * listing.num_bytes / size)


def _find_text(listing: Listing, level: Level | None) -> Inspection:
    found = Inspection("text", listing.format, listing.paths, listing.valid, listing.num_bytes, level=level or "byte")
    num_seen = 0
    for path in listing.paths:
        if num_seen >= MAX_BYTES:
            break
        content, is_whole = read_beginning(path)
        num_seen += len(content)
        try:
            # What was cut may end within a letter.
            getincrementaldecoder("utf-8")().decode(content, final=is_whole)
        except UnicodeDecodeError as error:
            if level in ("char", "word"):
                raise DataError(
                    f"{path}: byte {error.start + 1:,} is not UTF-8; convert the file, or use --level byte"
                ) from None
            note = f"{path.name} is not UTF-8 (byte {error.start + 1:,}), which only bytes as tokens can read"
            return replace(found, is_utf8=False, notes=(note,))
    return found


def _infer_kind(found: Inspection, of_sequences: str | None, of_series: str | None) -> DataKind:
    if of_sequences is not None or of_series is not None:
        return "sequences" if of_sequences is not None else "series"
    rows = _sequence_fields(found)
    has_steps = any(field.type == "numbers" for field in found.fields)
    if not rows and not has_steps and _short_texts(found):
        return "sequences"
    if not rows and not has_steps:
        names = ", ".join(f"{field.name} ({field.type})" for field in found.fields)
        raise DataError(f"{found.paths[0]} has neither text nor numbers to learn from, only {names}; give other data")
    if not rows:
        return "series"
    is_named = any(field.name in _SEQUENCE_COLUMNS or field.type != "text" for field in rows)
    if is_named or not has_steps or not any(field.type in ("times", "dates") for field in found.fields):
        return "sequences"
    raise AmbiguousInputError(
        f"{found.paths[0]} has text ({rows[0].name}), times and numbers: say with --kind sequences that each row is a "
        "sequence, or with --kind series that it is a step of time",
        "kind",
        f"Is each row a sequence (of {rows[0].name}), or a step of time in a series?",
        ("sequences", "series"),
    )


def _find_sequences(
    found: Inspection,
    records: Sequence[Mapping[str, Any]],
    sequence: str | None,
    label: str | None,
    is_labeled: bool,
    level: Level | None,
) -> Inspection:
    sequence = sequence or _choose_sequence(found)
    classes = [field.name for field in found.fields if field.is_categorical and field.name != sequence]
    notes = []
    if label is None and is_labeled:
        label = _choose_label(found, sequence, classes)
        if label is not None:
            notes.append(f"{label!r} is taken for the label; another with --label, none with --no-label")
    found = replace(found, sequence=sequence, label=label, labels=tuple(name for name in classes if name != label))
    if found.sequence_type == "text":
        texts = [str(record[sequence]) for record in records if record.get(sequence)]
        found = replace(found, level=level or _choose_level(texts, label))
    return replace(found, notes=tuple(notes))


def _sequence_fields(found: Inspection) -> list[FieldSummary]:
    """Fields that hold a sequence by their looks, or by their name if their texts are all alike."""
    named = [field for field in found.fields if field.name in _SEQUENCE_COLUMNS and field.type in ("names", "dates")]
    return [field for field in found.fields if field in named or (field.is_sequence and not _is_dates(field))]


def _is_dates(field: FieldSummary) -> bool:
    """Does it hold times that can't be read, by their looks or by its name?"""
    is_short = field.type in ("text", "names") and field.mean_length < _MAX_TIME_CHARS
    return field.type == "dates" or (is_short and field.name.lower() in _TIME_COLUMNS)


def _short_texts(found: Inspection) -> list[str]:
    """Fields of a few different texts, which are meant where there is nothing else."""
    return [field.name for field in found.fields if field.type == "names" and field.mean_length]


def _choose_sequence(found: Inspection) -> str:
    fields = [field.name for field in _sequence_fields(found)]
    fields = fields or _short_texts(found)
    if not fields:
        names = ", ".join(field.name for field in found.fields)
        raise DataError(f"{found.paths[0]} has no field of text, tokens or lists of numbers, only {names}")
    known = [name for name in _SEQUENCE_COLUMNS if name in fields]
    if not known and len(fields) > 1:
        raise AmbiguousInputError(
            f"{found.paths[0]} has several fields that could be the sequence ({', '.join(fields)}); name one with "
            "--sequence",
            "sequence",
            "Which field is the sequence?",
            fields,
        )
    return (known or fields)[0]


def _choose_label(found: Inspection, sequence: str, classes: Sequence[str]) -> str | None:
    known = [name for known in _LABEL_COLUMNS for name in classes if name.lower() == known]
    if known:
        return known[0]
    alike = [field.name for field in found.fields if field.is_constant and field.name.lower() in _LABEL_COLUMNS]
    alike = [name for name in alike if name != sequence]
    choices = (*alike, *classes)
    if not alike and len(choices) < 2:
        return next(iter(choices), None)
    why = (
        f"{alike[0]!r} has the same value in all rows that were looked at; say with --label {alike[0]} that it is the "
        "label"
        if alike
        else f"several fields could be the label ({', '.join(classes)}); name one with --label"
    )
    raise AmbiguousInputError(
        f"{found.paths[0]}: {why}, or say --no-label",
        "label",
        "Which field is the label, the thing to be told from a sequence? (none: go on with the sequence)",
        (*choices, "none"),
    )


def _choose_level(texts: Sequence[str], label: str | None) -> Level:
    """Words where a text is to be told from another: they are few steps. Bytes where it is to be gone on with."""
    words = [word for text in texts for word in split_symbols(text, "word")]
    if label is None or not words:
        return "byte"
    is_prose = len(set(words)) < _MAX_UNIQUE_FRACTION * len(words) and sum(map(len, words)) < _MAX_WORD_CHARS * len(
        words
    )
    return "word" if is_prose else "byte"


def _find_series(
    found: Inspection, head: FilePreview, records: Sequence[Mapping[str, Any]], time: str | None, by: str | None
) -> Inspection:
    time = time or _choose_time(found, records, head.is_csv)
    by = by or _choose_by(found, head, records, time)
    channels = [field for field in found.fields if field.type == "numbers" and field.name not in (time, by)]
    if not channels:
        beside = " ".join(["", *(f"beside {name}" for name in (time, by) if name is not None)])
        raise DataError(f"{found.paths[0]} has no column of numbers{beside}; give other data")
    dates = [field.name for field in found.fields if _is_dates(field) and field.name not in (time, by)]
    notes = [] if time else [_file_order_note(dates, records)]
    others = [field.name for field in found.fields if field not in channels and field.name not in (time, by, *dates)]
    if others:
        notes.append(f"no numbers, left out: {', '.join(others)}")
    missing = [field.name for field in channels if field.has_nan]
    if missing:
        notes.append(f"NA or NaN in {', '.join(missing)}: taken for missing values (--nan refuse refuses them)")
    first = records if by is None else [row for row in records if row.get(by) == records[0].get(by)]
    seconds = None if time is None else median_interval(parse_timestamps(first, time, head.is_csv))
    values = np.array(
        [[_number(row.get(field.name), head.is_csv) for field in channels] for row in first], dtype=np.float64
    )
    return replace(
        found,
        kind="series",
        time=time,
        by=by,
        columns=tuple(field.name for field in channels),
        seconds=seconds,
        period=infer_period(seconds, values),
        nan="missing" if missing else "refuse",
        has_missing=any(field.num_missing or field.has_nan for field in channels),
        notes=tuple(notes),
    )


def _file_order_note(dates: Sequence[str], records: Sequence[Mapping[str, Any]]) -> str:
    if not dates:
        return "no column of times was found: rows are steps in the order of the file (--time names one)"
    shown = next((record[dates[0]] for record in records if record.get(dates[0])), "")
    return (
        f"times in {dates[0]!r} ({shown}) are not written as 2025-01-31T12:00:00 is, so they are not read: rows are "
        "steps in the order of the file (--season says after how many they repeat themselves)"
    )


def _number(value: object, is_csv: bool) -> float:
    number = parse_number(value, is_csv)
    return number if number is not None and abs(number) < np.inf else np.nan


def _choose_time(found: Inspection, records: Sequence[Mapping[str, Any]], is_csv: bool) -> str | None:
    times = [field.name for field in found.fields if field.type == "times"]
    numbers = [field for field in found.fields if field.type == "numbers"]
    if not times:
        named = [field for field in numbers if field.name.lower() in _TIME_COLUMNS]
        times = [
            field.name for field in named if not is_decreasing_anywhere(parse_timestamps(records, field.name, is_csv))
        ]
    if not times:
        return next((field.name for field in numbers[:1] if is_row_counter(records, field.name, is_csv)), None)
    known = [name for name in times if name.lower() in _TIME_COLUMNS]
    if not known and len(times) > 1:
        raise AmbiguousInputError(
            f"{found.paths[0]} has several columns of times ({', '.join(times)}); name one with --time",
            "time",
            "Which column is the time of a row?",
            times,
        )
    return (known or times)[0]


def _choose_by(
    found: Inspection, head: FilePreview, records: Sequence[Mapping[str, Any]], time: str | None
) -> str | None:
    """The column that tells series apart: its values stand together, or time goes back where it changes."""
    last = [row.record for row in head.last if not row.problem]
    times = [] if time is None else parse_timestamps(records, time, head.is_csv)
    # Several series side by side: time begins again where one ends, or stands still where they are mixed.
    is_back = is_decreasing_anywhere(times) or has_many_repeats(times)
    names = [
        field for field in found.fields if field.type in ("names", "text") or field.name.lower() in _SERIES_COLUMNS
    ]
    names = [field for field in names if not _is_dates(field)]
    numbers = [field for field in found.fields if is_back and field.is_integer and field not in names]
    candidates: list[str] = []
    mixed: list[str] = []
    # Numbers may tell series apart too, where nothing else does.
    for fields in (names, numbers):
        for field in fields if not candidates and not mixed else ():
            different = len({str(record.get(field.name)) for record in (*records, *last)})
            if field.name == time or not 1 < different <= len(records) / 2:
                continue
            if is_grouped(records, field.name):
                candidates.append(field.name)
            elif time is not None and is_back and field in names and _is_mixed(records, field.name, time, head.is_csv):
                mixed.append(field.name)
    if mixed and not candidates:
        raise DataError(
            f"{found.paths[0]}: rows of several {mixed[0]!r} are mixed; sort them by {mixed[0]!r}, then by {time!r}, "
            "or name another column with --by"
        )
    known = [name for name in candidates if name.lower() in _SERIES_COLUMNS]
    if len(candidates) > 1 and len(known) != 1:
        raise AmbiguousInputError(
            f"{found.paths[0]} has several columns that could tell series apart ({', '.join(candidates)}); name one "
            "with --by",
            "by",
            "Which column says to which series a row belongs?",
            candidates,
        )
    return next(iter(known or candidates), None)


def _is_mixed(records: Sequence[Mapping[str, Any]], by: str, time: str, is_csv: bool) -> bool:
    """Does time go on for each value of a column by itself?"""
    values = {str(record.get(by)) for record in records}
    for value in values:
        times = parse_timestamps([record for record in records if str(record.get(by)) == value], time, is_csv)
        if is_decreasing_anywhere(times) or has_many_repeats(times):
            return False
    return True
