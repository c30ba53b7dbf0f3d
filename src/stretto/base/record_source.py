"""RecordSource: rows that can be written as records, whatever they are made from."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from stretto.base.task import Task


@runtime_checkable
class RecordSource(Protocol):
    """Rows with inputs and targets, such as those of `stretto.data.from_arrays`."""

    @property
    def task(self) -> Task:
        """The kind and size of inputs and targets."""

    def records(self) -> Iterator[Mapping[str, Any]]:
        """Yield each row as a record with `inputs` and, unless they are the next token, `targets`."""
