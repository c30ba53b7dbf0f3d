"""spool_records: writes records that are in memory, or come one by one, to a file, which can be prepared in parts."""

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, TypeGuard
from uuid import uuid4

import numpy as np

from stretto.base.disk import explain_write_errors
from stretto.base.errors import DataError
from stretto.base.record_source import RecordSource
from stretto.base.remote import is_remote
from stretto.base.task import GIVEN_TARGET_KINDS
from stretto.prepare.json_arrays import encode_array
from stretto.prepare.launcher_ranks import Ranks
from stretto.prepare.options import SequenceOptions
from stretto.prepare.prepare_job import Workers

Files = Sequence[Path | str] | Path | str
Records = Iterable[Mapping[str, Any]] | RecordSource
"""Records one by one, or rows such as those of `stretto.data.from_arrays`."""


def are_records(source: Files | Records) -> TypeGuard[Records]:
    """Whether this is data, and not the paths of files."""
    if isinstance(source, str | Path):
        return False
    return not isinstance(source, Sequence) or (len(source) > 0 and not isinstance(source[0], str | Path))


@contextmanager
def spool_records(records: Records, folder: Path | str, executor: Workers = None) -> Iterator[Path]:
    """Write records to a JSONL file beside `folder`, one at a time; it is deleted at the end of the context.

    If `folder` is a URL, the file is a temporary one on this machine.

    Arrays are written as `encode_array` does: read its parts with `has_arrays`.
    """
    if isinstance(executor, Ranks) or (executor is not None and is_remote(folder)):
        raise DataError("executor can't be combined with records in memory, which other machines don't see; use files")
    path = Path(f"{folder}.records.jsonl")
    if is_remote(folder):
        path = Path(tempfile.gettempdir(), f"stretto-{uuid4().hex}.records.jsonl")
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # of a call that was interrupted
    try:
        with explain_write_errors(path), path.open("x", encoding="utf-8") as file:
            rows = records.records() if isinstance(records, RecordSource) else records
            for index, record in enumerate(rows):
                file.write(_to_line(record, index))
        if not path.stat().st_size:
            raise DataError("there are no records to prepare; give at least one")
        yield path
    finally:
        path.unlink(missing_ok=True)


def source_options(source: Records, options: SequenceOptions) -> SequenceOptions:
    """Return options that read the records of rows as what they are; options of other records are unchanged."""
    if not isinstance(source, RecordSource):
        return options
    task = source.task
    for name in ("sequence", "inputs", "label", "targets", "target_kind", "read_as"):
        if getattr(options, name) is not None:
            raise DataError(
                f"{name}={getattr(options, name)} has no effect on rows, whose fields are known; leave it out"
            )
    options = replace(options, sequence="inputs", read_as=task.inputs)
    if task.categories:  # then a record has a field for each input
        options = replace(options, sequence=None, inputs=tuple(f"inputs.{index}" for index in range(task.num_inputs)))
    if task.inputs == "tokens" and options.like is None and options.num_tokens is None:
        options = replace(options, num_tokens=task.num_inputs)
    if task.targets == "next_token":
        return options
    # The values of a horizon are values of each time step.
    kind = task.targets if task.targets in GIVEN_TARGET_KINDS else "values_per_step"
    return replace(options, targets=("targets",), target_kind=kind)


def _to_line(record: object, index: int) -> str:
    if not isinstance(record, Mapping):
        raise DataError(
            f"record {index} is an object of type {type(record).__name__}; use a dict with a value per field"
        )
    try:
        return json.dumps(record, default=_to_plain, ensure_ascii=False) + "\n"
    except (TypeError, ValueError) as error:
        raise DataError(f"record {index} can't be written as JSON ({error}); use text, numbers and lists") from None


def _to_plain(value: object) -> object:
    """Return what JSON holds for a value that it does not know: an array, a Tensor, a number of numpy, or a time."""
    if isinstance(value, date):  # a datetime is a date
        return value.isoformat()
    array = np.asarray(value)
    if array.dtype.kind not in "biufU":
        raise TypeError(f"a field is of type {type(value).__name__}")
    return encode_array(array)
