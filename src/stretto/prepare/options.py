"""Options for each kind of preparation, for the Python API, the command line and the fingerprint."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from stretto.base.errors import DataError
from stretto.base.task import GIVEN_TARGET_KINDS, TABLE_TARGET_KINDS, TargetKind
from stretto.prepare.time_formats import check_time_format
from stretto.prepare.tokenizer import open_tokenizer
from stretto.store.index import Store
from stretto.store.sequences import Sequences, SharedProperties
from stretto.store.vocabulary import VOCABULARY_FILE, Level, Vocabulary, parse_vocabulary, vocabulary_bytes

BadRowPolicy = Literal["error", "skip"]
NanPolicy = Literal["error", "missing"]
ValueType = Literal["text", "tokens", "channels"]

LEVELS: tuple[Level, ...] = ("byte", "char", "word")  # those that need no tokenizer
SHARD_BYTES = 64 << 20


def option(
    default: Any,  # noqa: ANN401 - the default of any field
    help: str,
    metavar: str | None = None,
    *,
    type: Callable[[str], object] = str,
    choices: Sequence[str] | None = None,
) -> Any:  # noqa: ANN401 - as dataclasses.field
    """Return a dataclass field whose metadata says how the command line parses and explains it."""
    return field(default=default, metadata={"help": help, "metavar": metavar, "type": type, "choices": choices})


def split_names(text: str) -> tuple[str, ...]:
    """Return the names in `a, b, c`."""
    return tuple(name.strip() for name in text.split(","))


@dataclass(frozen=True)
class PrepareOptions:
    """The base class of all options: it validates them on creation."""

    def __post_init__(self) -> None:
        """Raise DataError for a value that is not allowed, whatever the data."""
        for item in fields(self):
            value, choices = getattr(self, item.name), item.metadata["choices"]
            if item.metadata["type"] is split_names and isinstance(value, str):  # a single name
                object.__setattr__(self, item.name, (value,))
            if choices is not None and value is not None and value not in choices:
                raise DataError(f"{item.name}={value!r} is not allowed; choose from {', '.join(choices)}")
            if item.name == "validation_fraction" and not 0 <= value < 1:
                raise DataError(f"validation_fraction={value} is not in [0, 1); use a fraction such as 0.1")
            if item.name == "time_format" and value is not None:
                check_time_format(value)
            if item.name == "shard_bytes" and value < 1:
                raise DataError(f"shard_bytes={value} must be at least 1")
            if item.name == "tokenizer" and value is not None:
                self._check_alone(value)

    def _check_alone(self, tokenizer: Path | str) -> None:
        """Reject other options that say what a token is."""
        for name in ("level", "vocabulary", "max_symbols"):
            if (value := getattr(self, name)) is not None:
                problem = f"tokenizer={tokenizer} and {name}={value} contradict each other"
                raise DataError(f"{problem}; leave one of them out")

    def to_dict(self) -> dict[str, Any]:
        """Return the options as plain values, for a fingerprint."""
        values: dict[str, Any] = {"options": type(self).__name__}
        for item in fields(self):
            value = getattr(self, item.name)
            # If an option names prepared data, the data's content counts, not its location.
            open_value = {"vocabulary": open_vocabulary, "like": open_like, "tokenizer": open_tokenizer}.get(item.name)
            values[item.name] = _plain(value if open_value is None else open_value(value))
        return values


_LEVEL_HELP = "what a token of text is (default: byte)"
_LIKE_HELP = "use this prepared data's"  # the beginning of a sentence; `_SPLIT_HELP` is the end of one
_VOCABULARY_HELP = "use the vocabulary of this prepared data instead of building one"
_MAX_SYMBOLS_HELP = "maximum size of the vocabulary: the unknown symbol and the most frequent characters or words"
_TOKENIZER_HELP = "train subwords, such as bpe:8000 for 8000 of them, or use the tokenizer in this tokenizer.json"
_SPLIT_HELP = "to use for validation, such as 0.1; writes FOLDER/train and FOLDER/valid (default: 0)"
_BAD_ROWS_HELP = "a row that can't be read is an error, or is skipped (default: error)"
_SHARD_BYTES_HELP = "approximate bytes of input in one shard (default: 64 MiB); a CSV or compressed file is one shard"
_TIME_FORMAT_HELP = "how times are written, in directives of Python's strptime (default: ISO 8601, or inferred)"
_NAN_HELP = "a NaN or an infinity (in CSV also NA) is an error, or a missing value (default: error)"


@dataclass(frozen=True)
class TextOptions(PrepareOptions):
    """How `prepare_text` turns text into tokens."""

    level: Level | None = option(None, _LEVEL_HELP, choices=LEVELS)
    vocabulary: Vocabulary | Path | str | None = option(None, _VOCABULARY_HELP, "FOLDER")
    max_symbols: int | None = option(None, _MAX_SYMBOLS_HELP, "N", type=int)
    tokenizer: Path | str | None = option(None, _TOKENIZER_HELP, "NAME")
    validation_fraction: float = option(0.0, f"fraction at the end of the text {_SPLIT_HELP}", "FRACTION", type=float)
    shard_bytes: int = option(SHARD_BYTES, "approximate bytes of text in one shard (default: 64 MiB)", "N", type=int)


@dataclass(frozen=True)
class SequenceOptions(PrepareOptions):
    """How `prepare_sequences` turns records into sequences."""

    sequence: str | None = option(None, "field with the sequence (default: inputs, text, tokens or values)", "FIELD")
    inputs: Sequence[str] | None = option(
        None,
        "instead of sequence: fields with a list of numbers or texts each, or one text, the channels",
        "A,B,...",
        type=split_names,
    )
    label: str | None = option(None, "field with the class of a sequence: text, integer or boolean", "FIELD")
    targets: Sequence[str] | None = option(
        None,
        "instead of label: fields with classes or values to predict, per row or time step",
        "A,B,...",
        type=split_names,
    )
    target_kind: TargetKind | None = option(
        None, "what the targets are (default: inferred from the first records)", choices=GIVEN_TARGET_KINDS
    )
    read_as: ValueType | None = option(
        None, "what a sequence consists of (default: inferred from the first record)", choices=get_args(ValueType)
    )
    level: Level | None = option(None, _LEVEL_HELP, choices=LEVELS)
    vocabulary: Vocabulary | Path | str | None = option(None, _VOCABULARY_HELP, "FOLDER")
    max_symbols: int | None = option(None, _MAX_SYMBOLS_HELP, "N", type=int)
    tokenizer: Path | str | None = option(None, _TOKENIZER_HELP, "NAME")
    num_tokens: int | None = option(None, "vocabulary size (default: largest token in the data + 1)", "N", type=int)
    like: Path | str | SharedProperties | None = option(
        None, f"{_LIKE_HELP} vocabulary, classes and statistics", "FOLDER"
    )
    validation_fraction: float = option(0.0, f"random fraction of the sequences {_SPLIT_HELP}", "FRACTION", type=float)
    seed: int = option(0, "random seed for the validation split (default: 0)", "N", type=int)
    bad_rows: BadRowPolicy = option("error", _BAD_ROWS_HELP, choices=get_args(BadRowPolicy))
    nan: NanPolicy = option("error", _NAN_HELP, choices=get_args(NanPolicy))
    shard_bytes: int = option(SHARD_BYTES, _SHARD_BYTES_HELP, "N", type=int)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label is not None and (self.targets is not None or self.target_kind not in (None, "class_per_row")):
            raise DataError(f"label={self.label} can't be combined with targets or target_kind; leave one of them out")
        if self.sequence is not None and self.inputs is not None:
            raise DataError(f"sequence={self.sequence} can't be combined with inputs; leave one of them out")
        for name in ("inputs", "targets"):
            if (fields := getattr(self, name)) is not None and not (fields and all(fields)):
                raise DataError(f"{name}={','.join(fields)} has an empty name; name at least one field")
            if fields is not None and len(set(fields)) < len(fields):
                raise DataError(f"{name}={','.join(fields)} names a field more than once; name each field once")

    @property
    def target_fields(self) -> tuple[str, ...]:
        """The fields of `targets` or `label`; empty if there are no targets."""
        return tuple(self.targets or ()) if self.label is None else (self.label,)


@dataclass(frozen=True)
class SeriesOptions(PrepareOptions):
    """How `prepare_series` turns tables into series."""

    columns: Sequence[str] | None = option(
        None,
        "columns to use as channels (default: those of numbers or of few different texts)",
        "A,B,...",
        type=split_names,
    )
    targets: Sequence[str] | None = option(
        None,
        "columns with classes or values of each row to predict, in place of a forecast",
        "A,B,...",
        type=split_names,
    )
    target_kind: TargetKind | None = option(
        None,
        "what the targets are (default: of each time step, inferred from the first rows)",
        choices=TABLE_TARGET_KINDS,
    )
    by: str | None = option(None, "column that names the series of a row (default: each file is one series)", "COLUMN")
    time: str | None = option(None, "column of times, which must not decrease within a series", "COLUMN")
    known_future: Sequence[str] = option(
        (), "columns whose values are known ahead of time, such as prices or a calendar", "A,B,...", type=split_names
    )
    static: Sequence[str] = option((), "columns that are constant within a series", "A,B,...", type=split_names)
    time_format: str | None = option(None, _TIME_FORMAT_HELP, "FORMAT")
    like: Path | str | SharedProperties | None = option(None, f"{_LIKE_HELP} columns and statistics", "FOLDER")
    validation_fraction: float = option(0.0, f"final fraction of each series {_SPLIT_HELP}", "FRACTION", type=float)
    bad_rows: BadRowPolicy = option("error", _BAD_ROWS_HELP, choices=get_args(BadRowPolicy))
    nan: NanPolicy = option("error", _NAN_HELP, choices=get_args(NanPolicy))


def open_vocabulary(vocabulary: Vocabulary | Path | str | None) -> Vocabulary | None:
    """Return `vocabulary`; if it is the location of prepared data, return that data's vocabulary."""
    if not isinstance(vocabulary, Path | str):
        return vocabulary
    return parse_vocabulary(Store.open(vocabulary).read_file(VOCABULARY_FILE), str(vocabulary))


def open_like(like: Path | str | SharedProperties | None) -> SharedProperties | None:
    """Return `like`; if it is the location of prepared data, return its shared properties."""
    if not isinstance(like, Path | str):
        return like
    sequences = Sequences.open(like)
    return SharedProperties(sequences.location, sequences.fields.values, sequences.fields.targets, sequences.vocabulary)


def given_vocabulary(options: TextOptions | SequenceOptions) -> Vocabulary | None:
    """Return the vocabulary that the options name, as prepared data or as a tokenizer; None if it must be built."""
    tokenizer = open_tokenizer(options.tokenizer)
    return open_vocabulary(options.vocabulary) if tokenizer is None or isinstance(tokenizer, int) else tokenizer


def token_level(options: TextOptions | SequenceOptions, vocabulary: Vocabulary | None) -> Level:
    """Return the level of the tokens, given their vocabulary if it is known; reject options that contradict it."""
    level, max_symbols = "subword" if options.tokenizer is not None else options.level, options.max_symbols
    if vocabulary is not None and level not in (None, vocabulary.level):
        raise DataError(f"level={level} is not the given vocabulary's level, {vocabulary.level}; leave one of them out")
    chosen: Level = vocabulary.level if vocabulary is not None else level or "byte"
    if max_symbols is not None and (vocabulary is not None or chosen == "byte"):
        reason = "a given vocabulary" if vocabulary is not None else "bytes"
        raise DataError(f"max_symbols={max_symbols} has no effect on {reason}; leave it out")
    if max_symbols is not None and max_symbols < 2:
        raise DataError(f"max_symbols={max_symbols} is too small, because <unk> counts as a symbol; use at least 2")
    return chosen


def _plain(value: Any) -> Any:  # noqa: ANN401 - the value of any field
    """Return an option as plain JSON values; a Vocabulary or SharedProperties becomes its content."""
    if isinstance(value, SharedProperties):
        targets = None if value.targets is None else value.targets.model_dump(mode="json")
        return [value.values.model_dump(mode="json"), targets, _plain(value.vocabulary)]
    if value is None or isinstance(value, str | int | float):
        return value
    return list(value) if isinstance(value, tuple | list) else vocabulary_bytes(value).decode()
