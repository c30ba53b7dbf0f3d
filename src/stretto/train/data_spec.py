"""Subject: what a run's data was about, kept beside its weights; without it the model's numbers have no names."""

import errno
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from stretto.base.errors import DataError
from stretto.base.run_folder import DATA_SPEC
from stretto.base.task import Task
from stretto.store.sequences import Channels, Origin
from stretto.store.vocabulary import FILE as VOCABULARY
from stretto.store.vocabulary import Vocabulary, parse_vocabulary, vocabulary_bytes


@dataclass(frozen=True)
class DataSpec:
    """What a model of some data is about: the names behind its numbers. Other data fits it if this is the same."""

    task: Task
    vocabulary: Vocabulary | None = None
    labels: tuple[str, ...] = ()
    channels: Channels | None = None
    origin: Origin | None = None  # how the files were read; other data may have been read otherwise


def check_same_spec(expected: DataSpec, found: DataSpec, what: str, other: str) -> None:
    """Refuse data that a model of other data would misread."""
    own, needed = found.task, expected.task
    if (own.inputs, own.targets) != (needed.inputs, needed.targets):
        raise DataError(
            f"{what} holds {own.inputs} and targets for {own.targets}, but {other} holds {needed.inputs} and targets for "
            f"{needed.targets}; give data of the same kind"
        )
    if found.vocabulary != expected.vocabulary:
        raise DataError(
            f"{what} has another vocabulary than {other}; prepare it with --like, or text with --vocabulary, set to "
            "that data"
        )
    for name, these, those in (
        ("labels", found.labels, expected.labels),
        ("channels or scale", found.channels, expected.channels),
        ("shape", found.task, expected.task),
    ):
        if these != those:
            raise DataError(f"{what} has other {name} than {other}; prepare it with --like set to that data")


def data_spec_files(data_spec: DataSpec) -> dict[str, bytes]:
    """Return a subject as it is written: `data_spec.json`, and `vocabulary.json` where there is one."""
    channels = None if data_spec.channels is None else data_spec.channels.model_dump()
    origin = None if data_spec.origin is None else data_spec.origin.model_dump()
    tree = {"task": asdict(data_spec.task), "labels": data_spec.labels, "channels": channels, "origin": origin}
    files = {DATA_SPEC: json.dumps(tree, ensure_ascii=False).encode()}
    if data_spec.vocabulary is not None:
        files[VOCABULARY] = vocabulary_bytes(data_spec.vocabulary)
    return files


def read_data_spec(read: Callable[[str], bytes | None], where: str) -> DataSpec:
    """Read what `data_spec_files` says; `read` returns a file by name, none if there is no such file."""
    try:
        content = read(DATA_SPEC)
        if content is None:
            raise FileNotFoundError(errno.ENOENT, "it is missing")
        tree = json.loads(content)
        channels = None if tree["channels"] is None else Channels.model_validate(tree["channels"])
        # Runs of earlier versions did not keep it.
        origin = None if tree.get("origin") is None else Origin.model_validate(tree["origin"])
        task, labels = Task(**tree["task"]), tuple(map(str, tree["labels"]))
        vocabulary = read(VOCABULARY)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{where}/{DATA_SPEC} can't be read ({error}); the run is not whole") from None
    known = None if vocabulary is None else parse_vocabulary(vocabulary, f"{where}/{VOCABULARY}")
    return DataSpec(task, known, labels, channels, origin)
