"""SequenceSchema: which fields of records hold the sequence and its targets."""

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.base.errors import DataError
from stretto.base.task import TargetKind
from stretto.prepare.field_check import check_field
from stretto.prepare.field_summary import FieldSummary
from stretto.prepare.file_listing import AmbiguousInputError
from stretto.prepare.hints import DataHints
from stretto.prepare.options import ValueType
from stretto.prepare.record_parser import RecordParser, as_list
from stretto.prepare.record_sample import RecordSample
from stretto.prepare.target_kind import infer_target_kind
from stretto.store.vocabulary import Level, split_symbols

_LABEL_NAMES = ("label", "labels", "class", "target", "targets", "category", "sentiment", "tags", "y")
# Text is split into words only if less than this fraction of them are distinct: else the vocabulary would be too large.
_MAX_UNIQUE_FRACTION = 0.5
_MAX_WORD_CHARS = 15  # and only if their mean length is below this: text without spaces has longer ones


@dataclass(frozen=True)
class SequenceSchema:
    """How records are read as sequences."""

    sequence: str  # field with the sequence
    value_type: ValueType | None  # what a sequence consists of; None if the field can't be read as a sequence
    level: Level | None = None  # how text is split into tokens; None if the sequence is not text
    has_words: bool = False  # the text is given as the list of its words
    label: str | None = None  # field with the label
    other_labels: tuple[str, ...] = ()  # other fields that could be the label
    inputs: tuple[str, ...] = ()  # if not empty, the fields with a channel each, in place of `sequence`
    targets: tuple[str, ...] = ()  # fields with the targets, if they are not a label
    target_kind: TargetKind | None = None  # None: a label, or no targets

    @property
    def target_fields(self) -> tuple[str, ...]:
        """The fields to predict: the label, or the targets; empty if the next time step is predicted."""
        return self.targets if self.label is None else (self.label,)


def infer_sequence_schema(sample: RecordSample, hints: DataHints) -> tuple[SequenceSchema, list[str]]:
    """Return how the records are read as sequences, and notes on what was inferred."""
    label, targets, kind = hints.label, hints.targets, hints.target_kind
    inputs = hints.inputs if len(hints.inputs) > 1 else ()
    sequence = hints.sequence or next(iter(hints.inputs), None) or _choose_sequence(sample, {label, *targets})
    value_type = "channels" if inputs else _value_type(sample.find(sequence))
    has_words = not inputs and sample.find(sequence).type == "words"
    # Of channels, parts of the sequence can be named too: those to forecast.
    if value_type == "channels" and all(name == sequence or name.startswith(f"{sequence}.") for name in targets):
        targets = ()
    for name in targets:
        check_field("targets", name, sample.path, sample.field_names)
    used = {sequence, *hints.inputs}
    label_fields = [field.name for field in sample.fields if field.could_be_label and field.name not in used]
    notes = []
    if label is None and not targets and hints.has_label:
        label, targets = _choose_targets(sample, sequence, label_fields)
        use = "as the label (label=FIELD chooses" if label is not None else "to predict (targets=FIELD chooses"
        if label is not None or targets:
            notes.append(f"{label or targets[0]!r} is used {use} another, has_label=False uses none)")
    level: Level | None = None
    if value_type == "text":
        level = hints.level or ("word" if has_words else _find_level(sample, sequence, label, targets))
    if targets and kind is None and value_type is not None:
        parser = RecordParser(sequence, value_type, level=level or "byte", has_words=has_words)
        kind = _infer_kind(sample, parser, targets)
    if label is None and kind == "class_per_row":
        label, targets = targets[0], ()
    kind = kind if targets else None
    other_labels = tuple(name for name in label_fields if name != label)
    if unused := [name for name in sample.field_names if name not in {*used, label, *targets}]:
        notes.append(f"fields that are not used: {', '.join(unused)}")
    schema = SequenceSchema(sequence, value_type, level, has_words, label, other_labels, inputs, targets, kind)
    return schema, notes


def list_sequence_fields(sample: RecordSample) -> list[FieldSummary]:
    """Return the fields that look like sequences."""
    fields = [
        field
        for field in sample.fields
        # Repeated short texts, times and lists of words are sequences only in a field with a usual name.
        if (field.has_sequence_name and field.type in ("category", "unparsed time", "words"))
        or (field.type in ("text", "tokens", "channels") and not field.may_be_unparsed_time)
    ]
    if fields or any(field.type == "number" for field in sample.fields):
        return fields
    # There is nothing else to read.
    return [field for field in sample.fields if field.type == "words"]


def list_category_fields(sample: RecordSample) -> list[FieldSummary]:
    """Return the fields with few distinct texts: one can be the sequence if no other field looks like one."""
    return [field for field in sample.fields if field.type == "category" and field.mean_length]  # not booleans


def _value_type(field: FieldSummary) -> ValueType | None:
    if field.type in ("text", "category", "unparsed time", "words"):
        return "text"
    return field.type if field.type == "tokens" or field.type == "channels" else None


def _choose_sequence(sample: RecordSample, excluded: set[str | None]) -> str:
    sequence_fields = [field for field in list_sequence_fields(sample) if field.name not in excluded]
    inputs = [field for field in sequence_fields if field.name.lower() not in _LABEL_NAMES]
    sequence_fields = inputs or sequence_fields
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


def _choose_targets(
    sample: RecordSample, sequence: str, label_fields: Sequence[str]
) -> tuple[str | None, tuple[str, ...]]:
    """Return the field with the label, or else the field with other targets; None and () if there are none."""
    usual = [name for usual_name in _LABEL_NAMES for name in label_fields if name.lower() == usual_name]
    if usual:
        return usual[0], ()
    others = [field for field in sample.fields if field.name != sequence and field.name.lower() in _LABEL_NAMES]
    others = [field for field in others if field.could_be_values or field.type in ("words", "other")]
    if others:
        return None, (others[0].name,)
    return _choose_label(sample, sequence, label_fields), ()


def _infer_kind(sample: RecordSample, parser: RecordParser, targets: tuple[str, ...]) -> TargetKind:
    lengths = [(record, parser.find_num_steps(record, sample.is_csv)) for record in sample.records]
    readable = [(record, steps) for record, steps in lengths if steps is not None]
    records, num_steps = [record for record, _ in readable], [steps for _, steps in readable]
    return infer_target_kind(records, num_steps, targets, sample.is_csv, parser.value_type)


def _find_level(sample: RecordSample, sequence: str, label: str | None, targets: tuple[str, ...]) -> Level:
    """Return what a token of text is, such that there are as many as targets, or else a first choice."""
    pairs = [(str(record[sequence]), record) for record in sample.records if record.get(sequence)]
    lists = [as_list(record.get(name), sample.is_csv) for _, record in pairs for name in targets[:1]]
    for choice in ("word", "char", "byte") if lists and None not in lists else ():
        parser = RecordParser(sequence, "text", level=choice)
        if all(parser.count_steps(text) == len(steps or ()) for (text, _), steps in zip(pairs, lists, strict=True)):
            return choice
    return _choose_level([text for text, _ in pairs], is_labeled=label is not None or bool(targets))


def _choose_label(sample: RecordSample, sequence: str, label_fields: Sequence[str]) -> str | None:
    """Return the field with the label, or None; raise if several could be it, or one with a usual name is constant."""
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


def _choose_level(texts: Sequence[str], *, is_labeled: bool) -> Level:
    """Return `word` for classification, to get shorter sequences, unless words are too diverse or long; else `byte`."""
    words = [word for text in texts for word in split_symbols(text, "word")]
    if not is_labeled or not words:
        return "byte"
    has_few_words = len(set(words)) < _MAX_UNIQUE_FRACTION * len(words)
    has_short_words = sum(map(len, words)) < _MAX_WORD_CHARS * len(words)
    return "word" if has_few_words and has_short_words else "byte"
