"""prepare_data: turns inspected files into stores, or reuses the stores if files and options have not changed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from stretto.base.disk import write_atomic
from stretto.base.errors import DataError
from stretto.prepare.inspection import Inspection, TextSchema
from stretto.prepare.options import BadRowPolicy, NanPolicy, SequenceOptions, SeriesOptions, TextOptions
from stretto.prepare.prepare_job import OnProgress, source_fingerprint
from stretto.prepare.prepare_sequences import prepare_sequences
from stretto.prepare.prepare_series import prepare_series
from stretto.prepare.prepare_text import prepare_text
from stretto.prepare.row_reader import OnSkipped, log_skipped_rows
from stretto.prepare.sequence_schema import SequenceSchema
from stretto.store.corpus import Corpus
from stretto.store.index import INDEX
from stretto.store.sequences import Sequences

# A file in the folder of prepared data: a fingerprint of the files and options that the data was made from.
SOURCE_FINGERPRINT = "source.sha256"
_MAX_WORDS = 20_000  # the default maximum size of a vocabulary of words

Stores = list[Corpus] | list[Sequences]
Options = TextOptions | SequenceOptions | SeriesOptions


@dataclass(frozen=True)
class PreparedData:
    """Data for training and for validation."""

    train: Corpus | Sequences
    valid: Corpus | Sequences | None
    is_reused: bool = False  # whether the folder already contained this data


def prepare_data(
    inspection: Inspection,
    folder: Path | str,
    *,
    validation_fraction: float | None = None,
    max_symbols: int | None = None,
    bad_rows: BadRowPolicy = "error",
    nan: NanPolicy | None = None,  # None: for series as inferred by the inspection, else error
    on_progress: OnProgress = lambda progress: None,
    on_skipped: OnSkipped = log_skipped_rows,
) -> PreparedData:
    """Prepare inspected files into `folder/train` and `folder/valid`; reuse them if they exist and nothing changed.

    The validation data is the inspection's validation files or, without any, `validation_fraction` of the data: by
    default a tenth, or the last fifth of each series. With `validation_fraction=0`, all data goes to `folder` itself.
    """
    make_or_reuse = partial(_make_or_reuse, on_progress=on_progress, on_skipped=on_skipped)
    folder = Path(folder)
    options = _make_options(inspection, max_symbols, bad_rows, nan)
    if not inspection.valid_paths:
        default = 0.2 if isinstance(options, SeriesOptions) else 0.1
        fraction = default if validation_fraction is None else validation_fraction
        options = replace(options, validation_fraction=fraction)
        stores, is_reused = make_or_reuse(inspection.paths, folder, options)
        return PreparedData(stores[0], stores[1] if len(stores) > 1 else None, is_reused)
    if validation_fraction:
        problem = f"validation_fraction={validation_fraction} has no effect with validation files"
        raise DataError(f"{problem} ({inspection.valid_paths[0]}); leave one of them out")
    (train,), is_train_reused = make_or_reuse(inspection.paths, folder / "train", options)
    options = _make_validation_options(options, train)
    (valid,), is_valid_reused = make_or_reuse(inspection.valid_paths, folder / "valid", options)
    return PreparedData(train, valid, is_train_reused and is_valid_reused)


def _make_options(
    inspection: Inspection, max_symbols: int | None, bad_rows: BadRowPolicy, nan: NanPolicy | None
) -> Options:
    schema = inspection.schema
    if isinstance(schema, TextSchema | SequenceSchema) and schema.level == "word" and max_symbols is None:
        max_symbols = _MAX_WORDS
    if isinstance(schema, TextSchema):
        level = None if schema.level == "subword" else schema.level
        return TextOptions(level=level, max_symbols=max_symbols, tokenizer=inspection.tokenizer)
    if isinstance(schema, SequenceSchema):
        return SequenceOptions(
            sequence=None if schema.inputs else schema.sequence,
            inputs=schema.inputs or None,
            label=schema.label,
            targets=schema.targets or None,
            target_kind=schema.target_kind,
            # As inferred from many rows: the numbers of the first row may be integers by chance.
            read_as=schema.value_type,
            level=None if schema.level == "subword" else schema.level,
            max_symbols=max_symbols,
            tokenizer=inspection.tokenizer,
            bad_rows=bad_rows,
            nan=nan or "error",
        )
    return SeriesOptions(
        targets=schema.targets or None,
        target_kind=schema.target_kind,
        columns=schema.columns,
        by=schema.by,
        time=schema.time,
        known_future=schema.known_future,
        static=schema.static,
        time_format=schema.time_format,
        bad_rows=bad_rows,
        nan=nan or schema.nan,
    )


def _make_validation_options(options: Options, train: Corpus | Sequences) -> Options:
    """Return options for validation files: they get the vocabulary, classes and statistics of the training data."""
    if isinstance(options, TextOptions):
        assert isinstance(train, Corpus)
        return TextOptions(vocabulary=train.vocabulary)
    if isinstance(options, SequenceOptions):
        return replace(options, like=train.location, level=None, max_symbols=None, tokenizer=None)
    return replace(options, like=train.location, columns=None)


def _make_or_reuse(
    paths: Sequence[Path], folder: Path, options: Options, on_progress: OnProgress, on_skipped: OnSkipped
) -> tuple[Stores, bool]:
    """Return the stores in a folder, and whether they were reused: made earlier from the same files and options."""
    fingerprint = source_fingerprint(paths, options.to_dict()).encode()
    fingerprint_path = folder / SOURCE_FINGERPRINT
    split_folders = sorted(path.parent for path in folder.glob(f"*/{INDEX}"))  # train, then valid
    if (folder / INDEX).exists() or split_folders:
        if not fingerprint_path.is_file() or fingerprint_path.read_bytes() != fingerprint:
            problem = "holds data that was prepared from other or changed files, or in a different way"
            raise DataError(f"{folder} {problem}; choose a different folder, or delete it")
        folders = split_folders or [folder]
        if isinstance(options, TextOptions):
            return [Corpus.open(path) for path in folders], True
        return [Sequences.open(path) for path in folders], True
    stores: Stores
    if isinstance(options, TextOptions):
        stores = prepare_text(paths, folder, options, on_progress=on_progress)
    elif isinstance(options, SequenceOptions):
        stores = prepare_sequences(paths, folder, options, on_progress=on_progress, on_skipped=on_skipped)
    else:
        stores = prepare_series(paths, folder, options, on_progress=on_progress, on_skipped=on_skipped)
    write_atomic(fingerprint_path, fingerprint)
    return stores, False
