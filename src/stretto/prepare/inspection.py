"""inspect_data: finds out from samples whether files contain text, sequences or series."""

from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stretto.base.errors import DataError
from stretto.prepare.downloads import localize, urls_in_errors
from stretto.prepare.field_check import check_field
from stretto.prepare.field_summary import FieldSummary
from stretto.prepare.file_listing import AmbiguousInputError, Format, Listing, list_files, list_validation_files
from stretto.prepare.hints import DataHints, DataKind
from stretto.prepare.record_sample import MAX_BYTES, RecordSample, read_beginning, sample_records
from stretto.prepare.records import list_paths
from stretto.prepare.sequence_schema import (
    SequenceSchema,
    infer_sequence_schema,
    list_category_fields,
    list_sequence_fields,
)
from stretto.prepare.series_schema import SeriesSchema, infer_series_schema
from stretto.prepare.series_target_schema import choose_series_targets, target_kind_of, without_targets
from stretto.prepare.time_formats import check_time_format
from stretto.store.vocabulary import Level


@dataclass(frozen=True)
class TextSchema:
    """How text files are read."""

    level: Level
    is_utf8: bool = True


@dataclass(frozen=True)
class Inspection:
    """What files contain, judging by samples of them, and how they are read."""

    format: Format
    paths: tuple[Path, ...]  # files for training
    schema: TextSchema | SequenceSchema | SeriesSchema
    valid_paths: tuple[Path, ...] = ()  # files for validation, given or recognized by their names
    num_bytes: int = 0  # size of the training files; saved datasets don't count
    num_rows: int | None = None  # approximate number of rows; None for text
    fields: tuple[FieldSummary, ...] = ()
    notes: tuple[str, ...] = ()  # decisions that you may want to change
    tokenizer: str | None = None  # of subwords: `bpe:8000`, or the path of a tokenizer.json

    @property
    def kind(self) -> DataKind:
        """Whether the files contain text, sequences or series."""
        if isinstance(self.schema, TextSchema):
            return "text"
        return "sequences" if isinstance(self.schema, SequenceSchema) else "series"


@urls_in_errors()
def inspect_data(
    paths: Sequence[Path | str] | Path | str, hints: DataHints = DataHints(), *, valid: Sequence[Path | str] = ()
) -> Inspection:
    """Return what files or folders contain, judging by the start of the text, or by some records of the first file.

    `hints` says what you know already. `valid` lists the validation files; without it, they are recognized by
    names such as `valid.csv`. URLs of files are downloaded. Where the files can be read in several ways, an
    AmbiguousInputError says what to decide.
    """
    if hints.kind not in (None, "text", "sequences", "series"):
        raise DataError(f"kind={hints.kind!r} is not allowed; choose from text, sequences, series")
    if hints.tokenizer is not None:
        hints = replace(hints, level="subword")
    listing = list_files(list_paths(paths), hints.format)
    is_text = listing.format == "text" or hints.kind == "text"
    if validation_files := list_validation_files(map(localize, valid), listing.format, is_text):
        ignored = (*listing.ignored, *listing.valid_paths)
        listing = replace(listing, valid_paths=validation_files, ignored=ignored, is_split_by_name=False)
    inspection = _inspect_text(listing, hints) if is_text else _inspect_records(listing, hints)
    return replace(inspection, tokenizer=hints.tokenizer)


def _inspect_text(listing: Listing, hints: DataHints) -> Inspection:
    if hints.kind not in (None, "text"):
        raise DataError(
            f"kind={hints.kind} needs records, but {listing.paths[0]} is text; use JSONL, CSV, Parquet or .npz"
        )
    schema, notes, num_read = TextSchema(hints.level or "byte"), [], 0
    for path in listing.paths:
        if num_read >= MAX_BYTES:
            break
        content, is_complete, _ = read_beginning(path)
        num_read += len(content)
        try:
            # The bytes that were read may end within a character, unless they are the whole file.
            getincrementaldecoder("utf-8")().decode(content, final=is_complete)
        except UnicodeDecodeError as error:
            place = f"byte {error.start + 1:,}"
            if hints.level not in (None, "byte"):
                raise DataError(f"{path}: {place} is not UTF-8; convert the file, or use level=byte") from None
            schema = replace(schema, is_utf8=False)
            notes.append(f"{path.name} is not UTF-8 ({place}): it can only be read as bytes")
            break
    return _make_inspection(listing, schema, notes)


def _inspect_records(listing: Listing, hints: DataHints) -> Inspection:
    if hints.time_format is not None:
        check_time_format(hints.time_format)
    sample = sample_records(listing.paths[0], hints.time_format)
    named = [(name, getattr(hints, name)) for name in ("sequence", "label", "time", "by")]
    for name, value in (*named, *(("inputs", value) for value in hints.inputs)):
        if value is not None:
            check_field(name, value, sample.path, sample.field_names)
    schema: SequenceSchema | SeriesSchema
    if (hints.kind or _infer_kind(sample, hints)) == "series":
        kind = target_kind_of(sample, hints)
        inputs = sample if kind is None else without_targets(sample, hints)
        schema, notes = infer_series_schema(inputs, hints)
        schema, target_notes = choose_series_targets(schema, hints, kind)
        notes += target_notes
    else:
        schema, notes = infer_sequence_schema(sample, hints)
    inspection = _make_inspection(listing, schema, notes)
    return replace(inspection, fields=sample.fields, num_rows=_estimate_num_rows(listing, sample))


def _make_inspection(
    listing: Listing, schema: TextSchema | SequenceSchema | SeriesSchema, notes: Sequence[str]
) -> Inspection:
    """Return an inspection, with notes on the validation files and on ignored files."""
    notes = [*notes]
    if listing.is_split_by_name:
        notes.append(f"validation files, recognized by their names: {_list_names(listing.valid_paths)}")
    if listing.ignored:
        notes.append(f"ignored: {_list_names(listing.ignored)}")
    return Inspection(listing.format, listing.paths, schema, listing.valid_paths, listing.num_bytes, notes=tuple(notes))


def _list_names(paths: Sequence[Path], limit: int = 3) -> str:
    more = f" and {len(paths) - limit:,} more" if len(paths) > limit else ""
    return ", ".join(path.name for path in paths[:limit]) + more


def _estimate_num_rows(listing: Listing, sample: RecordSample) -> int:
    """Return the approximate number of rows in all training files, extrapolated from the first one."""
    size = sample.path.stat().st_size if sample.path.is_file() else 0
    return round(sample.num_rows * listing.num_bytes / size) if size else sample.num_rows * len(listing.paths)


def _infer_kind(sample: RecordSample, hints: DataHints) -> DataKind:
    if hints.sequence or hints.label or any(sample.find(name).type == "words" for name in hints.inputs):
        return "sequences"
    if hints.time or hints.by or hints.time_format:
        return "series"
    sequence_fields = list_sequence_fields(sample)
    has_numbers = any(field.type == "number" for field in sample.fields)
    if not sequence_fields and not has_numbers:
        if list_category_fields(sample):
            return "sequences"
        fields = ", ".join(f"{field.name} ({field.type})" for field in sample.fields)
        raise DataError(f"{sample.path} has neither text nor numbers, only {fields}; use different data")
    if not sequence_fields:
        return "series"
    is_certain = any(field.has_sequence_name or field.type != "text" for field in sequence_fields)
    has_times = any(field.type in ("time", "unparsed time") for field in sample.fields)
    if is_certain or not has_numbers or not has_times:
        return "sequences"
    name = sequence_fields[0].name
    raise AmbiguousInputError(
        f"{sample.path} has text ({name}), times and numbers; use kind=sequences if each row is a sequence, or "
        "kind=series if each row is a time step",
        "kind",
        f"Is each row a sequence (its {name}), or a time step of a series?",
        ("sequences", "series"),
    )
