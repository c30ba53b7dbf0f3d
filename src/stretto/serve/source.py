"""Opens the data to make predictions for: a store, or a file, which is prepared like the run's data."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from stretto.base.errors import DataError
from stretto.base.remote import is_remote
from stretto.base.scratch import make_scratch_folder
from stretto.base.task import has_own_length, is_per_step
from stretto.prepare.compression import content_suffix, is_compressed
from stretto.prepare.downloads import localize, remote_name, urls_in_errors
from stretto.prepare.options import SequenceOptions, SeriesOptions, TextOptions
from stretto.prepare.prepare_sequences import prepare_sequences
from stretto.prepare.prepare_series import prepare_series
from stretto.prepare.prepare_text import prepare_text
from stretto.prepare.records import FORMATS, cut_records, list_paths, read_rows
from stretto.store.corpus import Corpus, CorpusFields
from stretto.store.index import Store
from stretto.store.sequences import Channels, Classes, Origin, Sequences, SharedProperties, StoredTargets, Tokens
from stretto.train.data_spec import DataSpec, check_same_spec


def is_raw(location: Path | str) -> bool:
    """Return whether this is a file to be prepared first, rather than a store; a URL is a file if it has a suffix."""
    if not is_remote(location):
        return Path(location).is_file()
    path = Path(remote_name(str(location)))
    return is_compressed(path) or content_suffix(path) in (*FORMATS, ".txt")


def open_source(location: Path | str, data_spec: DataSpec) -> Corpus | Sequences:
    """Open prepared data, which must match the run's `data_spec`, except that it needs no targets."""
    if not is_remote(location) and not Path(location).exists():
        raise DataError(f"{location} does not exist; use a prepared folder, the URL of one, or a file")
    store = Store.open(location)
    source = Corpus.from_store(store) if store.kind == CorpusFields.kind else Sequences.from_store(store)
    check_same_spec(data_spec, _spec_of(source, data_spec), "the run", str(location))
    return source


@contextmanager
def ensure_prepared(
    location: Path | str, data_spec: DataSpec, fields: "FieldNames | None" = None
) -> Iterator[Path | str]:
    """Yield the location of prepared data; a file is prepared in a temporary folder."""
    if not is_raw(location):
        yield location
        return
    with make_scratch_folder() as scratch:
        folder = Path(scratch) / "data"
        prepare_source(location, folder, data_spec, fields)
        yield folder


@dataclass(frozen=True)
class FieldNames:
    """Which fields of a file to read, where their names differ from those of the run's files."""

    sequence: str | None = None
    targets: tuple[str, ...] = ()
    by: str | None = None  # the column that identifies a series


@urls_in_errors()
def prepare_source(file: Path | str, folder: Path, data_spec: DataSpec, fields: FieldNames | None = None) -> None:
    """Prepare a file like the run's data: with the same vocabulary, or the same channels, mean and std."""
    file = localize(file)
    task, origin, fields = data_spec.task, data_spec.origin or Origin(), fields or FieldNames()
    if task.inputs == "channels" and data_spec.channels is None:
        raise DataError(
            f"{file} can't be read like the run's data, which comes from a function (data.factory); load its rows "
            "yourself, and call stretto.serve.predict_arrays(stretto.load_model(RUN), rows)"
        )
    values = data_spec.channels or Tokens(num_tokens=task.num_inputs)  # num_inputs is the vocabulary size
    shared = SharedProperties("the run", values, _stored_targets(data_spec), data_spec.vocabulary)
    if task.targets == "horizon" or (isinstance(values, Channels) and not origin.inputs):
        names = _field_names(file)
        assert isinstance(values, Channels)
        for name in values.names:
            if name not in names:
                raise DataError(f"{file} has no column {name!r}, which the run was trained on; use a table that has it")
        by = fields.by or (origin.by if origin.by in names else None)
        time = origin.time if origin.time in names else None
        time_format = None if time is None else origin.time_format
        columns = origin.targets if names.issuperset(origin.targets) else ()  # the true targets are optional
        series = SeriesOptions(
            by=by,
            time=time,
            time_format=time_format,
            targets=columns or None,
            target_kind=shared.targets.kind if columns and shared.targets is not None else None,
            like=shared,
            nan="missing",
        )
        prepare_series(file, folder, series)
    elif content_suffix(file) in FORMATS:
        names = _field_names(file)
        inputs = (fields.sequence,) if fields.sequence else tuple(name for name in origin.inputs if name in names)
        targets = fields.targets
        if not targets and shared.targets is not None and names.issuperset(origin.targets):
            targets = origin.targets  # the true targets are optional
        sequence_options = SequenceOptions(
            like=shared,
            inputs=inputs or None,
            read_as="text" if data_spec.vocabulary is not None else values.type,
            targets=targets or None,
            target_kind=shared.targets.kind if targets and shared.targets is not None else None,
        )
        prepare_sequences(file, folder, sequence_options)
    elif data_spec.vocabulary is not None and task.targets == "next_token":
        prepare_text(file, folder, TextOptions(vocabulary=data_spec.vocabulary))
    else:
        raise DataError(f"{file} is not a file of records ({', '.join(FORMATS)}); use one, or a prepared folder")


def _field_names(file: Path | str) -> set[str]:
    """Return the field names of a file's first record; an empty set if there is none or it is invalid."""
    row = next(iter(read_rows(cut_records(list_paths(file), part_bytes=None)[0])), None)
    return set() if row is None or row.problem else set(row.record)


def _spec_of(source: Corpus | Sequences, run_spec: DataSpec) -> DataSpec:
    """Return the spec of `source`; if `source` has no targets or the task needs none, the spec has those of the run."""
    if isinstance(source, Corpus):
        return DataSpec(replace(run_spec.task, inputs="tokens", num_inputs=len(source.vocabulary)), source.vocabulary)
    values, targets = source.fields.values, source.fields.targets
    spec = replace(run_spec, vocabulary=source.vocabulary, channels=values if isinstance(values, Channels) else None)
    if isinstance(values, Channels):
        spec = replace(spec, task=replace(run_spec.task, inputs="channels"), categories=values.categories)
    else:
        spec = replace(spec, task=replace(run_spec.task, inputs="tokens", num_inputs=values.num_tokens))
    if targets is None or run_spec.task.targets in ("next_token", "horizon"):
        return spec
    task = replace(spec.task, targets=targets.kind)
    if isinstance(targets, Classes):
        return replace(spec, task=task, labels=targets.names, target_values=None)
    return replace(spec, task=task, labels=(), target_values=targets)


def _stored_targets(data_spec: DataSpec) -> StoredTargets | None:
    """Return how a store describes the targets of a run; None if they follow from the inputs."""
    if data_spec.target_values is not None:
        return data_spec.target_values
    kind = data_spec.task.targets
    if not data_spec.labels:
        return None
    return Classes(names=data_spec.labels, per_step=is_per_step(kind), own_length=has_own_length(kind))
