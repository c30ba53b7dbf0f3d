"""Subject: what a run's data was about, kept beside its weights; without it the model's numbers have no names."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from stretto.base.errors import DataError
from stretto.base.task import Task
from stretto.data.sequences import Channels
from stretto.data.vocabulary import FILE as VOCABULARY
from stretto.data.vocabulary import Vocabulary, read_vocabulary, write_vocabulary

FILE = "subject.json"


@dataclass(frozen=True)
class Subject:
    """What a model of some data is about: the names behind its numbers. Other data fits it if this is the same."""

    task: Task
    vocabulary: Vocabulary | None = None
    labels: tuple[str, ...] = ()
    channels: Channels | None = None


def check_same(expected: Subject, found: Subject, what: str, other: str) -> None:
    """Refuse data that a model of other data would misread."""
    own, needed = found.task, expected.task
    if (own.inputs, own.asks) != (needed.inputs, needed.asks):
        raise DataError(
            f"{what} holds {own.inputs} and asks for {own.asks}, but {other} holds {needed.inputs} and asks for "
            f"{needed.asks}; give data of the same kind"
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


def write_subject(folder: Path, subject: Subject) -> None:
    """Write `subject.json`, and `vocabulary.json` where there is one."""
    channels = None if subject.channels is None else subject.channels.model_dump()
    tree = {"task": asdict(subject.task), "labels": subject.labels, "channels": channels}
    (folder / FILE).write_text(json.dumps(tree, ensure_ascii=False), encoding="utf-8")
    if subject.vocabulary is not None:
        write_vocabulary(folder, subject.vocabulary)


def read_subject(folder: Path) -> Subject:
    """Read what `write_subject` wrote."""
    path = folder / FILE
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        channels = None if tree["channels"] is None else Channels.model_validate(tree["channels"])
        task, labels = Task(**tree["task"]), tuple(map(str, tree["labels"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} can't be read ({error}); the run is not whole") from None
    vocabulary = read_vocabulary(folder) if (folder / VOCABULARY).is_file() else None
    return Subject(task, vocabulary, labels, channels)
