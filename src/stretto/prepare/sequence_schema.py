"""SequenceSchema: which fields of records hold the sequence and its label."""

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.base.errors import DataError
from stretto.prepare.field_summary import FieldSummary
from stretto.prepare.file_listing import AmbiguousInputError
from stretto.prepare.options import ValueType
from stretto.prepare.record_sample import RecordSample
from stretto.store.vocabulary import Level, split_symbols

_LABEL_NAMES = ("label", "labels", "class", "target", "category", "sentiment", "y", "targets")
# Text is split into words only if less than this fraction of them are distinct: else the vocabulary would be too large.
_MAX_UNIQUE_FRACTION = 0.5
_MAX_WORD_CHARS = 15  # and only if their mean length is below this: text without spaces has longer ones


@dataclass(frozen=True)
class SequenceSchema:
    """How records are read as sequences."""

    sequence: str  # field with the sequence
    value_type: ValueType | None  # what a sequence consists of; None if the field can't be read as a sequence
    level: Level | None = None  # how text is split into tokens; None if the sequence is not text
    label: str | None = None  # field with the label
    other_labels: tuple[str, ...] = ()  # other fields that could be the label


def infer_sequence_schema(
    sample: RecordSample, sequence: str | None, label: str | None, has_label: bool, level: Level | None
) -> tuple[SequenceSchema, list[str]]:
    """Return how the records are read as sequences, and notes on what was inferred."""
    sequence = sequence or _choose_sequence(sample)
    label_fields = [field.name for field in sample.fields if field.could_be_label and field.name != sequence]
    notes = []
    if label is None and has_label:
        label = _choose_label(sample, sequence, label_fields)
        if label is not None:
            notes.append(f"{label!r} is used as the label (label=FIELD chooses another, has_label=False uses none)")
    value_type = _value_type(next(field for field in sample.fields if field.name == sequence))
    if value_type == "text":
        texts = [str(record[sequence]) for record in sample.records if record.get(sequence)]
        level = level or _choose_level(texts, label)
    else:
        level = None
    other_labels = tuple(name for name in label_fields if name != label)
    return SequenceSchema(sequence, value_type, level, label, other_labels), notes


def list_sequence_fields(sample: RecordSample) -> list[FieldSummary]:
    """Return the fields that look like sequences."""
    return [
        field
        for field in sample.fields
        # Repeated short texts, and times, are sequences only in a field with a usual name.
        if (field.has_sequence_name and field.type in ("category", "unparsed time"))
        or (field.type in ("text", "tokens", "channels") and not field.may_be_unparsed_time)
    ]


def list_category_fields(sample: RecordSample) -> list[FieldSummary]:
    """Return the fields with few distinct texts: one can be the sequence if no other field looks like one."""
    return [field for field in sample.fields if field.type == "category" and field.mean_length]  # not booleans


def _value_type(field: FieldSummary) -> ValueType | None:
    if field.type in ("text", "category", "unparsed time"):
        return "text"
    return field.type if field.type == "tokens" or field.type == "channels" else None


def _choose_sequence(sample: RecordSample) -> str:
    sequence_fields = list_sequence_fields(sample)
    names = [field.name for field in sequence_fields or list_category_fields(sample)]
    if not names:
        problem = f"has no field of text, tokens or lists of numbers (its fields: {', '.join(sample.field_names)})"
        raise DataError(f"{sample.path} {problem}; use different data")
    # The alphabetical order of the usual names is also the order of preference.
    usual = sorted((field for field in sequence_fields if field.has_sequence_name), key=lambda field: field.name)
    if not usual and len(names) > 1:
        raise AmbiguousInputError(
            f"{sample.path} has several fields that could be the sequence ({', '.join(names)}); choose one with "
            "sequence=FIELD",
            "sequence",
            "Which field is the sequence?",
            names,
        )
    return usual[0].name if usual else names[0]


def _choose_label(sample: RecordSample, sequence: str, label_fields: Sequence[str]) -> str | None:
    """Return the field with the label, or None; raise if several could be it, or one with a usual name is constant."""
    usual = [name for usual_name in _LABEL_NAMES for name in label_fields if name.lower() == usual_name]
    if usual:
        return usual[0]
    constant = [field.name for field in sample.fields if field.is_constant and field.name != sequence]
    constant = [name for name in constant if name.lower() in _LABEL_NAMES]
    choices = (*constant, *label_fields)
    if not constant and len(choices) < 2:
        return next(iter(choices), None)
    if constant:
        problem = f"{constant[0]!r} has the same value in all rows read; set label={constant[0]} to use it anyway"
    else:
        problem = f"several fields could be the label ({', '.join(label_fields)}); choose one with label=FIELD"
    raise AmbiguousInputError(
        f"{sample.path}: {problem}, or has_label=False for no label",
        "label",
        "Which field is the label to predict? (none: predict the next time step of the sequence)",
        (*choices, "none"),
    )


def _choose_level(texts: Sequence[str], label: str | None) -> Level:
    """Return `word` for classification, to get shorter sequences, unless words are too diverse or long; else `byte`."""
    words = [word for text in texts for word in split_symbols(text, "word")]
    if label is None or not words:
        return "byte"
    has_few_words = len(set(words)) < _MAX_UNIQUE_FRACTION * len(words)
    has_short_words = sum(map(len, words)) < _MAX_WORD_CHARS * len(words)
    return "word" if has_few_words and has_short_words else "byte"
