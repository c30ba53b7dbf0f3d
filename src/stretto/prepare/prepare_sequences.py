"""prepare_sequences: turns records into a store; each record is one sequence of text, tokens or channels."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from stretto.base.errors import DataError
from stretto.base.task import has_classes, has_own_length, is_per_row, is_per_step
from stretto.prepare.categories import OnNote, find_categories, log_note
from stretto.prepare.category_codes import Codes, codes_of
from stretto.prepare.csv_parts import cut_csv
from stretto.prepare.downloads import urls_in_errors
from stretto.prepare.field_check import check_fields
from stretto.prepare.options import BadRowPolicy, SequenceOptions, given_vocabulary, open_like, token_level
from stretto.prepare.part_runner import PartResult, PartResults
from stretto.prepare.prepare_job import Job, OnProgress, Workers, open_job
from stretto.prepare.random_split import RandomSplit
from stretto.prepare.record_parser import RecordParser, as_list, infer_parser, parse_number, sort_class_names
from stretto.prepare.record_spool import Files, Records, are_records, source_options, spool_records
from stretto.prepare.records import RecordPart, cut_records, list_paths, read_rows
from stretto.prepare.row_reader import BadRowError, OnSkipped, RowReader, SkippedRows, allows, log_skipped_rows
from stretto.prepare.saved_vocabulary import SavedVocabulary, save_vocabulary
from stretto.prepare.shard_writer import (
    ShardResult,
    Shards,
    finish_part,
    make_channels,
    make_target_values,
    note_unknown,
    open_shards,
    write_parts,
    write_store,
)
from stretto.prepare.symbol_counts import SymbolCounter, build_vocabulary, counts_name
from stretto.prepare.target_kind import infer_target_kind
from stretto.prepare.target_parser import ParsedTargets, TargetParser, make_target_parser
from stretto.prepare.tokenizer import open_tokenizer, train_tokenizer
from stretto.prepare.work_folder import WorkFolder, join_location
from stretto.store.sequences import (
    CHANNEL_DTYPE,
    CLASS_DTYPE,
    Channels,
    Classes,
    Origin,
    Sequences,
    SharedProperties,
    StoredTargets,
    TargetValues,
    Tokens,
)
from stretto.store.subwords import split_lines
from stretto.store.vocabulary import ByteVocabulary, Vocabulary, split_symbols, token_dtype

_SAMPLED_ROWS = 100  # how many records the kind of targets is inferred from


@urls_in_errors()
def prepare_sequences(
    files: Files | Records,
    folder: Path | str,
    options: SequenceOptions = SequenceOptions(),
    *,
    workers: int | None = None,
    executor: Workers = None,
    on_progress: OnProgress = lambda progress: None,
    on_skipped: OnSkipped = log_skipped_rows,
    on_note: OnNote = log_note,
) -> list[Sequences]:
    """Write the records of files, of saved Hugging Face datasets, or of Python, as sequences to `folder`.

    Files are JSONL, CSV or Parquet, or `.npz` or `.npy`, in which a record is a row of the arrays. Each record is one
    sequence, in the field `options.sequence`. Text becomes tokens: bytes, characters or words (`level`). Unless
    `read_as` is set, lists of integers are tokens, but channels in a field named `values`. Lists of texts are words, a
    token each. Lists of other numbers and lists of lists are channels, with null for a missing value; `inputs` names
    several fields with a list each, which become channels. One of several `inputs` with a text or boolean per record,
    or a list of them, holds categories: at most 1,000, stored as codes.

    `label` names the field with the class of a sequence. `targets` names fields of any kind of targets: a class (text,
    integer or boolean), a number or a list of numbers for the sequence, or a list with a class, a number or a list of
    numbers for each time step; or a sequence of classes with a length of its own, a list or a text, whose characters
    are the classes. `target_kind` says which, if it can't be inferred. null is a target that is missing.

    In place of files, give an iterable of dicts, which is read once, one record at a time; or rows such as those of
    `from_arrays`, `from_dataset` or `from_table`, with the targets that they have. Both are first written to a
    temporary file beside `folder`.

    With `validation_fraction`, sequences are drawn at random for `folder/valid`; the others go to `folder/train`.
    Vocabulary and statistics come from the training split, unless `vocabulary` or `like` names other prepared data.
    `workers` and `executor` say who writes the parts, as in `prepare_text`.
    Returns each split's sequences.
    """
    start_job = partial(open_job, folder, workers=workers, on_progress=on_progress, executor=executor)
    if are_records(files):
        options = source_options(files, options)
        with spool_records(files, folder, executor) as path:
            parts = [replace(part, has_arrays=True) for part in cut_records([path], options.shard_bytes)]
            return _prepare_parts([path], parts, folder, options, start_job, on_skipped, on_note)
    paths = list_paths(cast("Files", files), is_local=executor is None)
    parts = cut_records(paths, options.shard_bytes)
    return _prepare_parts(paths, parts, folder, options, start_job, on_skipped, on_note)


def _prepare_parts(
    paths: list[Path],
    parts: list[RecordPart],
    folder: Path | str,
    options: SequenceOptions,
    start_job: Callable[..., AbstractContextManager[Job]],  # `open_job`, with who writes the parts
    on_skipped: OnSkipped,
    on_note: OnNote,
) -> list[Sequences]:
    kind = options.target_kind
    if kind is not None and (is_per_row(kind) or has_own_length(kind)):
        parts = [replace(part, per_row=tuple(options.target_fields)) for part in parts]
    shared = open_like(options.like)
    if options.bad_rows == "error":
        target_option = "targets" if options.label is None else "label"
        named = [*(("inputs", name) for name in options.inputs or ()), ("sequence", options.sequence)]
        check_fields(parts, [*named, *((target_option, name) for name in options.target_fields)])
    parser = replace(_first_parser(parts, options), num_tokens=options.num_tokens, nan=options.nan)
    parser, vocabulary = _complete_parser(parser, shared, options)
    target = _make_target_parser(parts, parser, options, shared)
    if parser.level == "subword" and target is not None and is_per_step(target.kind):
        problem = f"targets={','.join(target.fields)} has a target per time step, which a subword is not"
        raise DataError(f"{problem}; use level=char or level=word, or give the tokens as integers")
    settings = _SequenceSettings(options, _RowParser(parser, target), shared)
    # `paths` keeps a path that is given twice: its records are written twice, and the fingerprint includes it twice.
    with start_job(inputs=paths, options=options.to_dict(), splits=settings.splits) as job:
        if vocabulary is not None:
            settings = replace(settings, vocabulary=save_vocabulary(job, lambda: vocabulary))
        parts = cut_csv(job, parts, options.shard_bytes)
        settings = _with_categories(job, parts, _train_subwords(job, parts, settings))
        settings = _scan(job, parts, settings)
        skipped, notes = _write(job, parts, settings)
    for note in notes:
        on_note(note)
    _note_unused(parts[0], settings, on_note)
    if skipped.num_rows:
        on_skipped(skipped)
    return [Sequences.open(join_location(folder, split)) for split in settings.splits]


@dataclass(frozen=True)
class _RowParser:
    """Parses records into sequences and targets."""

    sequence: RecordParser
    target: TargetParser | None

    @property
    def fields(self) -> list[str]:
        return [*self.sequence.fields, *(self.target.fields if self.target is not None else ())]

    @property
    def target_dtype(self) -> "np.dtype[Any] | None":
        if self.target is None:
            return None
        return CLASS_DTYPE if has_classes(self.target.kind) else CHANNEL_DTYPE

    @property
    def targets_have_own_length(self) -> bool:
        return self.target is not None and has_own_length(self.target.kind)

    @property
    def needs_classes(self) -> bool:
        """Whether the names of the classes are not known yet."""
        return self.target is not None and has_classes(self.target.kind) and self.target.classes is None

    def parse(self, record: Mapping[str, Any], is_csv: bool) -> tuple[Any, ParsedTargets | None]:
        """Return a record's text, tokens `[steps]` or channels `[steps, channels]`, and its targets, if any."""
        value = self.sequence.parse(record, is_csv)
        if self.target is None:
            return value, None
        num_steps = self.sequence.count_steps(value) if is_per_step(self.target.kind) else 1
        return value, self.target.parse(record, is_csv, num_steps)


@dataclass(frozen=True)
class _SequenceSettings:
    """Everything that decides how a record is written: the options, and what follows from the files and `like`."""

    options: SequenceOptions
    row_parser: _RowParser
    shared: SharedProperties | None  # of `like`
    vocabulary: SavedVocabulary | None = None  # of text, when it is known

    @property
    def parser(self) -> RecordParser:
        return self.row_parser.sequence

    @property
    def split(self) -> RandomSplit:
        fraction = self.options.validation_fraction
        return RandomSplit(fraction, self.options.seed if fraction else 0)

    @property
    def splits(self) -> tuple[str, ...]:
        return self.split.names


def _num_tokens(parser: RecordParser, vocabulary: Vocabulary | None) -> int:
    """Return the vocabulary size."""
    if vocabulary is not None:
        return len(vocabulary)
    assert parser.num_tokens is not None, "set by the scan"
    return parser.num_tokens


def _first_parser(parts: Sequence[RecordPart], options: SequenceOptions) -> RecordParser:
    """Return a parser for the records, inferred from the first one that can be read."""
    texts = _find_text_fields(parts[0], options.inputs or ())
    # A single field of texts, or of lists of words, is text, unless it is to be read as a channel.
    if options.inputs is not None and (len(options.inputs) > 1 or (texts and options.read_as == "channels")):
        if options.read_as not in (None, "channels"):
            problem = f"read_as={options.read_as} is not possible with inputs={','.join(options.inputs)}"
            raise DataError(f"{problem}, which are channels; leave it out")
        categories: dict[str, Codes] = {name: {} for name in texts}
        return RecordParser(",".join(options.inputs), "channels", tuple(options.inputs), categories=categories)
    sequence = options.sequence or next(iter(options.inputs or ()), None)
    first_bad = ""
    for part in parts:
        reader = RowReader(part, options.bad_rows)
        is_csv = part.format == "csv"
        parse = partial(infer_parser, is_csv=is_csv, sequence=sequence, value_type=options.read_as)
        for _, parser in reader.read(parse):
            return parser
        first_bad = first_bad or reader.first_bad
    first = f" (the first is {first_bad})" if first_bad else ""
    raise DataError(f"no row can be read as a sequence{first}; use different files or options")


def _find_text_fields(part: RecordPart, names: Sequence[str]) -> list[str]:
    """Return those of some fields whose values in the first records are texts or booleans, or lists of them."""
    if not names:
        return []
    is_csv = part.format == "csv"
    records = [row.record for row in islice(read_rows(part), _SAMPLED_ROWS) if not row.problem]
    fields = []
    for name in names:
        values = [record.get(name) for record in records]
        lists = [[value] if (steps := as_list(value, is_csv)) is None else steps for value in values]
        present = [value for steps in lists for value in steps if value is not None and value != ""]
        if present and all(isinstance(value, str | bool) and parse_number(value, is_csv) is None for value in present):
            fields.append(name)
    return fields


def _complete_parser(
    parser: RecordParser, shared: SharedProperties | None, options: SequenceOptions
) -> tuple[RecordParser, Vocabulary | None]:
    """Return the parser, completed from `options` and `like`, and the vocabulary if known; reject contradictions."""
    _check_token_options(parser, shared, options)
    vocabulary = given_vocabulary(options)
    if shared is not None:
        parser = _apply_shared(parser, shared)
        vocabulary = shared.vocabulary
    if parser.value_type != "text":
        return parser, vocabulary
    if parser.has_words and vocabulary is None and options.level is None and options.tokenizer is None:
        options = replace(options, level="word")
    level = token_level(options, vocabulary)
    if parser.has_words and level != "word":
        problem = f"{parser.sequence!r} has lists of words, but a token is a {level}"
        raise DataError(f"{problem}; use level=word, or join the words of each list with spaces into one text")
    return replace(parser, level=level), ByteVocabulary() if level == "byte" else vocabulary


def _check_token_options(parser: RecordParser, shared: SharedProperties | None, options: SequenceOptions) -> None:
    """Reject token options that don't apply to this type of sequence, or that `like` already determines."""
    for name in ("level", "vocabulary", "max_symbols", "tokenizer", "num_tokens"):
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
    values = shared.values
    value_type = "text" if shared.vocabulary is not None else values.type
    if value_type != parser.value_type:
        raise DataError(
            f"like={shared.location} has {value_type}, but {parser.sequence!r} holds {parser.value_type}; "
            "use different data"
        )
    if isinstance(values, Channels) and len(values.names) != (num_channels := len(parser.channel_names)):
        problem = f"like={shared.location} and {parser.sequence!r} differ in the number of channels"
        raise DataError(f"{problem} ({len(values.names)} and {num_channels}); use different data")
    if isinstance(values, Tokens):
        return replace(parser, num_tokens=values.num_tokens)
    # By position, as fields may have other names than those of `like`.
    channels = zip(parser.channel_names, values.names, strict=True)
    categories = {name: codes_of(values.categories[like]) for name, like in channels if like in values.categories}
    return replace(parser, num_tokens=None, categories=categories)


def _make_target_parser(
    parts: Sequence[RecordPart], parser: RecordParser, options: SequenceOptions, shared: SharedProperties | None
) -> TargetParser | None:
    """Return a parser for the targets, if there are any; what is not given is inferred from the first records."""
    fields, kind = options.target_fields, "class_per_row" if options.label is not None else options.target_kind
    if not fields:
        if kind is not None:
            raise DataError(f"target_kind={kind} needs targets; name their fields with targets=FIELD")
        return None
    if clash := set(fields).intersection(parser.fields):
        raise DataError(f"{min(clash)!r} can't be both an input and a target; name different fields")
    is_csv = parts[0].format == "csv"
    # Bad rows are reported later: here, they are left out. Of the others, only the targets are kept in memory.
    rows = islice((row.record for row in read_rows(parts[0]) if not row.problem), _SAMPLED_ROWS)
    sample = [({name: row[name] for name in fields if name in row}, parser.find_num_steps(row, is_csv)) for row in rows]
    if kind is None:
        readable = [(record, steps) for record, steps in sample if steps is not None]
        if not readable:
            raise DataError(f"{parts[0].path}: none of the first rows has a sequence; set target_kind")
        records, num_steps = [record for record, _ in readable], [steps for _, steps in readable]
        kind = infer_target_kind(records, num_steps, fields, is_csv, parser.value_type)
    target = make_target_parser([record for record, _ in sample], fields, kind, is_csv, options.nan)
    target = replace(target, is_label=options.label is not None)
    return target if shared is None else _apply_shared_targets(target, shared, options)


def _apply_shared_targets(target: TargetParser, shared: SharedProperties, options: SequenceOptions) -> TargetParser:
    """Return the parser with the classes of `shared`; reject targets that don't match it."""
    if shared.targets is None:
        given = f"label={options.label}" if options.label is not None else f"targets={','.join(target.fields)}"
        raise DataError(f"like={shared.location} has no {'labels' if options.label else 'targets'}; leave {given} out")
    if shared.targets.kind != target.kind:
        problem = f"like={shared.location} has targets of kind {shared.targets.kind}, not {target.kind}"
        raise DataError(f"{problem}; use different data, or set target_kind={shared.targets.kind}")
    if isinstance(shared.targets, Classes):
        return replace(target, classes=_numbered(shared.targets.names))
    if len(shared.targets.names) != len(target.names):
        problem = f"like={shared.location} and targets={','.join(target.fields)} differ in the number of values"
        raise DataError(f"{problem} ({len(shared.targets.names)} and {len(target.names)}); use different data")
    return target


def _numbered(names: Sequence[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


def _train_subwords(job: Job, parts: Sequence[RecordPart], settings: _SequenceSettings) -> _SequenceSettings:
    """Return settings with the vocabulary of subwords, if one must be trained."""
    parser, num_tokens = settings.parser, open_tokenizer(settings.options.tokenizer)
    if parser.value_type != "text" or not isinstance(num_tokens, int):
        return settings
    numbered = list(enumerate(parts))
    read, sizes = (
        _RecordLines(settings.parser, settings.options.bad_rows, settings.split),
        [part.size for part in parts],
    )
    may_skip_rows = settings.options.bad_rows == "skip"
    vocabulary = train_tokenizer(job, numbered, sizes, read, num_tokens, may_skip_rows=may_skip_rows)
    return replace(settings, vocabulary=vocabulary)


@dataclass(frozen=True)
class _RecordLines:
    """Reads the lines of each text of a part that is not for validation."""

    parser: RecordParser
    bad_rows: BadRowPolicy = field(repr=False)  # see `train_tokenizer`
    split: RandomSplit

    def __call__(self, numbered: tuple[int, RecordPart], /) -> Iterator[list[str]]:
        number, part = numbered
        parser, reader = self.parser, RowReader(part, self.bad_rows)
        for row_index, text in reader.read(partial(parser.parse, is_csv=part.format == "csv"), parser.fields):
            if self.split.choose(number, row_index) != "valid":
                yield split_lines(text)


def _with_categories(job: Job, parts: Sequence[RecordPart], settings: _SequenceSettings) -> _SequenceSettings:
    """Return settings with the codes of the categories, unless `like` has given them."""
    unknown = [name for name, codes in settings.parser.categories.items() if not codes]
    if not unknown:
        return settings
    codes = find_categories(job, parts, unknown, settings.options.bad_rows, has_lists=True)
    parser = replace(settings.parser, categories=codes)
    return replace(settings, row_parser=replace(settings.row_parser, sequence=parser))


def _note_unused(part: RecordPart, settings: _SequenceSettings, on_note: OnNote) -> None:
    """Name the fields of the first record that are not used, unless the options name those to use."""
    options = settings.options
    if options.sequence is not None or options.inputs is not None or options.like is not None:
        return
    record = next((row.record for row in read_rows(part) if not row.problem), {})
    if unused := [name for name in record if name not in settings.row_parser.fields]:
        on_note(f"fields that are not used: {', '.join(unused)} (inputs=NAMES, label=FIELD and targets=NAMES choose)")


def _scan(job: Job, parts: Sequence[RecordPart], settings: _SequenceSettings) -> _SequenceSettings:
    """Return settings with the vocabulary, or its size, and the classes; read all records if any of them is unknown."""
    parser = settings.parser
    is_text = parser.value_type == "text"
    needs_vocabulary = (
        settings.vocabulary is None if is_text else parser.value_type == "tokens" and parser.num_tokens is None
    )
    row_parser = settings.row_parser
    if not needs_vocabulary and not row_parser.needs_classes:
        return settings
    phase = f"counting {parser.level}s" if needs_vocabulary and is_text else "scanning records"
    # Only symbols are counted for the training split alone.
    split = settings.split if needs_vocabulary and is_text else None
    bad_rows, sizes = settings.options.bad_rows, [part.size for part in parts]
    task, merge = _ScanPart(row_parser, bad_rows, needs_vocabulary, split), partial(_merge_scans, job, len(parts))
    result = job.run("scan", task, parts, sizes, phase, merge, is_valid=partial(allows, bad_rows))
    vocabulary = settings.vocabulary
    if needs_vocabulary and is_text:
        vocabulary = build_vocabulary(job, parser.level, result["paths"], settings.options.max_symbols)
    elif needs_vocabulary:
        parser = replace(parser, num_tokens=result["largest"] + 1)
    target = row_parser.target
    if target is not None and row_parser.needs_classes:
        if not result["classes"]:
            raise DataError(f"targets={target.fields[0]} has no class in any row; choose a different field")
        blank = [""] if has_own_length(target.kind) else []  # class 0 is never a target
        target = replace(target, classes=_numbered([*blank, *sort_class_names(result["classes"])]))
    return replace(settings, row_parser=_RowParser(parser, target), vocabulary=vocabulary)


def _merge_scans(job: Job, num_parts: int, results: PartResults) -> PartResult:
    names: set[str] = set()
    largest, first_bad = -1, {}  # first_bad: the first bad row of each part without a good one
    paths: dict[int, str] = {}  # of the counts of each part
    for number, result in results:
        names.update(result["classes"])
        largest = max(largest, result["largest"])
        paths.update((number, file["path"]) for file in result["files"])
        if not result["num_rows"]:
            first_bad[number] = result["first_bad"]
    if len(first_bad) == num_parts:
        first = next((first_bad[number] for number in range(num_parts) if first_bad[number]), "")
        raise DataError(f"{job.target} would be empty: all rows are bad (the first is {first}); use different files")
    return {"classes": sorted(names), "largest": largest, "paths": [paths[number] for number in sorted(paths)]}


def _write(job: Job, parts: Sequence[RecordPart], settings: _SequenceSettings) -> tuple[SkippedRows, list[str]]:
    options, write_stores = settings.options, partial(_write_stores, job, settings)
    task = _WriteSequences(settings.row_parser, settings.vocabulary, options.bad_rows, settings.split)
    return write_parts(job, task, parts, settings.splits, options, write_stores)


def _write_stores(job: Job, settings: _SequenceSettings, shards: Shards, on_note: OnNote) -> None:
    parser, splits = settings.parser, settings.splits
    vocabulary = None if settings.vocabulary is None else settings.vocabulary.open(job.folder)
    values: Tokens | Channels
    if parser.value_type == "channels":
        shared_values = None if settings.shared is None else settings.shared.values
        like = shared_values if isinstance(shared_values, Channels) else None
        values = make_channels(parser.channel_names, shards[splits[0]], like, parser.categories)  # of training
        note_unknown(parser.channel_names, shards, parser.categories, on_note)
    else:
        values = Tokens(num_tokens=_num_tokens(parser, vocabulary))
    target = settings.row_parser.target
    targets = None if target is None else _stored_targets(target, shards[splits[0]], settings.shared)
    origin = Origin(inputs=tuple(parser.fields), targets=() if target is None else target.fields)
    for split in splits:
        write_store(job, split, shards[split], values, targets, vocabulary, origin)


def _stored_targets(
    target: TargetParser, shards: Sequence[ShardResult], shared: SharedProperties | None
) -> StoredTargets:
    """Return what the index says about the targets; `shards` are those of the training data."""
    if target.classes is not None:
        names = tuple(target.classes)
        return Classes(names=names, per_step=is_per_step(target.kind), own_length=has_own_length(target.kind))
    like = shared.targets if shared is not None and isinstance(shared.targets, TargetValues) else None
    return make_target_values(target.names, shards, is_per_step(target.kind), like)


@dataclass(frozen=True)
class _ScanPart:
    """Finds the classes of a part, and its symbols or its largest token."""

    row_parser: _RowParser
    bad_rows: BadRowPolicy = field(repr=False)  # see `allows`
    needs_vocabulary: bool  # for tokens, only its size
    split: RandomSplit | None  # of a text whose symbols are counted

    def __call__(self, part: RecordPart, number: int, folder: WorkFolder, /) -> PartResult:
        row_parser, reader = self.row_parser, RowReader(part, self.bad_rows)
        parser = row_parser.sequence
        counter = SymbolCounter(parser.level)
        classes: set[str] = set()
        largest, num_rows = -1, 0
        parse = partial(row_parser.parse, is_csv=part.format == "csv")
        for row_index, (value, targets) in reader.read(parse, row_parser.fields):
            num_rows += 1
            if isinstance(targets, list):
                classes.update(name for name in targets if name is not None)
            if not self.needs_vocabulary:
                continue
            if parser.value_type == "tokens":
                largest = max(largest, int(value.max()))
            # As for a corpus, the vocabulary is built from the training split.
            elif self.split is not None and self.split.choose(number, row_index) != "valid":
                counter.update(split_symbols(value, parser.level))
        files = [] if self.split is None else [counter.write(folder, counts_name(number))]
        return {
            "files": files,
            "largest": largest,
            "classes": sorted(classes),
            "num_rows": num_rows,
            "first_bad": reader.first_bad,
        }


@dataclass(frozen=True)
class _WriteSequences:
    """Writes the sequences of a part, each to its split."""

    row_parser: _RowParser
    vocabulary: SavedVocabulary | None
    bad_rows: BadRowPolicy = field(repr=False)  # see `allows`
    split: RandomSplit

    def __call__(self, part: RecordPart, number: int, folder: WorkFolder, /) -> PartResult:
        row_parser, parser, target = self.row_parser, self.row_parser.sequence, self.row_parser.target
        vocabulary = None if self.vocabulary is None else self.vocabulary.open(folder)
        dtype: np.dtype[Any] = CHANNEL_DTYPE
        if parser.value_type != "channels":
            dtype = token_dtype(_num_tokens(parser, vocabulary))
        reader = RowReader(part, self.bad_rows)
        rows = reader.read(partial(row_parser.parse, is_csv=part.format == "csv"), row_parser.fields)
        target_dtype, own_length = row_parser.target_dtype, row_parser.targets_have_own_length
        with open_shards(folder, self.split.names, number, dtype, target_dtype, own_length=own_length) as writers:
            for row_index, (value, parsed_targets) in rows:
                writer = writers[self.split.choose(number, row_index)]
                targets = None if target is None or parsed_targets is None else target.encode(parsed_targets)
                if vocabulary is None:
                    writer.append(value, targets)
                else:
                    tokens = vocabulary.encode(value)
                    if not len(tokens):
                        remedy = "use a different tokenizer"
                        reader.reject(row_index, BadRowError("the tokenizer finds no token in the text", remedy))
                        continue
                    writer.append(tokens, targets, len(value.encode()))
            return finish_part(writers, reader)
