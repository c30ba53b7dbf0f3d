"""Source: the data that a model is asked about: a store, or a file that is prepared as the run's own data was."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from stretto.base.errors import DataError
from stretto.base.remote import is_remote
from stretto.base.scratch import make_scratch
from stretto.data.corpus import Corpus
from stretto.data.index import Store
from stretto.data.like import Like
from stretto.data.parts import OnProgress
from stretto.data.prepare import prepare_text
from stretto.data.prepare_sequences import prepare_sequences
from stretto.data.prepare_series import prepare_series
from stretto.data.sequences import Channels, Classes, Sequences, Tokens
from stretto.train.subject import Subject, check_same

_RECORDS = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")


def is_raw(location: Path | str) -> bool:
    """Is it a file, which has to be prepared first, rather than the folder or URL of a store?"""
    return not is_remote(location) and Path(location).is_file()


def open_source(location: Path | str, subject: Subject) -> Corpus | Sequences:
    """Open prepared data that fits a model of `subject`; it may be without labels."""
    store = Store.open(location)
    source = Corpus.of(store) if store.kind == "tokens" else Sequences.of(store)
    check_same(subject, _found(source, subject), str(location), "the run")
    return source


@contextmanager
def prepared(location: Path | str, subject: Subject, *, sequence: str | None = None) -> Iterator[Path | str]:
    """Give the location of prepared data; a file is prepared for as long as the context lasts."""
    if not is_raw(location):
        yield location
        return
    with make_scratch() as scratch:
        folder = Path(scratch) / "data"
        prepare_source([location], folder, subject, sequence=sequence)
        yield folder


def prepare_source(
    files: Sequence[Path | str],
    folder: Path,
    subject: Subject,
    *,
    sequence: str | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> None:
    """Prepare files as the run's own data was: with its vocabulary, or its channels and their scale."""
    task = subject.task
    values = Tokens(num_tokens=task.num_inputs) if subject.channels is None else subject.channels
    labels = Classes(names=subject.labels) if subject.labels else None
    like = Like("the run", values, labels, subject.vocabulary)
    is_records = all(Path(file).suffix.lower() in _RECORDS for file in files)
    if task.inputs == "channels" and task.asks == "values":
        prepare_series(files, folder, like=like, nan="missing", on_progress=on_progress)
    elif is_records:
        prepare_sequences(files, folder, like=like, sequence=sequence, on_progress=on_progress)
    elif subject.vocabulary is not None and task.asks == "tokens":
        prepare_text(files, folder, subject.vocabulary.level, vocabulary=subject.vocabulary, on_progress=on_progress)
    else:
        raise DataError(f"{files[0]} is not a file of records ({', '.join(_RECORDS)}); give one, or a prepared folder")


def _found(source: Corpus | Sequences, subject: Subject) -> Subject:
    """What the data is about, where it is silent (a label that is asked for) as the model has it."""
    if isinstance(source, Corpus):
        return Subject(replace(subject.task, inputs="tokens", num_inputs=len(source.vocabulary)), source.vocabulary)
    values, labels = source.fields.values, source.fields.labels
    names = subject.labels if labels is None or subject.task.asks != "labels" else labels.names
    if isinstance(values, Channels):
        return Subject(replace(subject.task, inputs="channels"), None, names, values)
    return Subject(replace(subject.task, inputs="tokens", num_inputs=values.num_tokens), source.vocabulary, names)
