"""DataSpec: what the numbers of a dataset mean. It is saved with a model's weights."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import ValidationError

from stretto.base.bounded_read import parse_json
from stretto.base.errors import DataError
from stretto.base.reason import short_reason
from stretto.base.run_folder import DATA_SPEC
from stretto.base.strict_model import first_error
from stretto.base.task import CategoryInputs, Task
from stretto.store.sequences import Channels, Origin, TargetValues
from stretto.store.vocabulary import VOCABULARY_FILE, Vocabulary, parse_vocabulary, vocabulary_bytes


@dataclass(frozen=True)
class DataSpec:
    """What a model must know about its data. The model can use any data whose spec differs only in `origin`."""

    task: Task
    vocabulary: Vocabulary | None = None
    labels: tuple[str, ...] = ()  # the names of the classes
    channels: Channels | None = None
    origin: Origin | None = None  # how the original files were read
    target_values: TargetValues | None = None  # None: targets are classes or follow from the inputs
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # names of those of text inputs, by column


def check_same_spec(expected: DataSpec, actual: DataSpec, expected_name: str, actual_name: str) -> None:
    """Raise DataError if a model for data with the expected spec would misread data with the actual spec."""
    task, expected_task = actual.task, expected.task
    for part, kind, expected_kind in (
        ("inputs", task.inputs, expected_task.inputs),
        ("targets", task.targets, expected_task.targets),
    ):
        if kind != expected_kind:
            problem = f"{actual_name} has {kind} as {part}, but {expected_name} has {expected_kind}"
            raise DataError(f"{problem}; use data of the same kind")
    for part, value, expected_value in (
        ("its vocabulary", actual.vocabulary, expected.vocabulary),
        ("its labels", actual.labels, expected.labels),
        ("the categories of its text", actual.categories, expected.categories),
        ("its channels or their scale", actual.channels, expected.channels),
        ("the values to predict or their scale", actual.target_values, expected.target_values),
        ("the number of inputs or outputs", task, expected_task),
    ):
        if value != expected_value:
            remedy = "prepare it again with like=FOLDER (for text: vocabulary=FOLDER), the folder of the training data"
            raise DataError(f"{actual_name} differs from {expected_name} in {part}; {remedy}")


def data_spec_files(data_spec: DataSpec) -> dict[str, bytes]:
    """Return the files of a spec by name: `data_spec.json`, and `vocabulary.json` for text."""
    channels = None if data_spec.channels is None else data_spec.channels.model_dump()
    origin = None if data_spec.origin is None else data_spec.origin.model_dump()
    target_values = None if data_spec.target_values is None else data_spec.target_values.model_dump()
    tree = {
        "task": asdict(data_spec.task),
        "labels": data_spec.labels,
        "channels": channels,
        "origin": origin,
        "target_values": target_values,
        "categories": dict(data_spec.categories),
    }
    files = {DATA_SPEC: json.dumps(tree, ensure_ascii=False).encode()}
    if data_spec.vocabulary is not None:
        files[VOCABULARY_FILE] = vocabulary_bytes(data_spec.vocabulary)
    return files


def read_data_spec(read: Callable[[str], bytes | None], where: str) -> DataSpec:
    """Parse the files of a spec in `where`, a folder or URL; `read` returns a file's content, or None if missing."""
    try:
        content = read(DATA_SPEC)
        if content is None:
            raise ValueError("it is missing")
        tree = parse_json(content)
        channels = None if tree["channels"] is None else Channels.model_validate(tree["channels"])
        origin = None if tree["origin"] is None else Origin.model_validate(tree["origin"])
        values = tree["target_values"]
        target_values = None if values is None else TargetValues.model_validate(values)
        task, labels = _parse_task(tree["task"]), tuple(map(str, tree["labels"]))
        categories = {str(name): tuple(map(str, names)) for name, names in tree.get("categories", {}).items()}
        vocabulary_json = read(VOCABULARY_FILE)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = first_error(error) if isinstance(error, ValidationError) else short_reason(error)
        raise DataError(f"{where}/{DATA_SPEC} can't be read ({reason}); the run or checkpoint is damaged") from None
    vocabulary = None if vocabulary_json is None else parse_vocabulary(vocabulary_json, f"{where}/{VOCABULARY_FILE}")
    return DataSpec(task, vocabulary, labels, channels, origin, target_values, categories)


def _parse_task(tree: Mapping[str, Any]) -> Task:
    categories = [
        CategoryInputs(int(category["num_names"]), tuple(map(int, category["inputs"])))
        for category in tree.get("categories", ())
    ]
    return Task(**{**tree, "categories": tuple(categories)})
