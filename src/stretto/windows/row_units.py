"""Row units: positions in a shard, counted in rows or in time steps, and which rows start between two of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from stretto.store.sequences import IntArray, Sequences


class UnitSource(Protocol):
    """The shards of a dataset, measured in some unit; each row takes up one unit or more, and rows don't overlap."""

    @property
    def shard_units(self) -> Sequence[int]:
        """The size of each shard."""

    def rows(self, shard: int, start: int, stop: int) -> tuple[int, IntArray]:
        """Return the index of the first row that starts between `start` and `stop`, and the lengths of all that do."""


class ShardedLengths(Protocol):
    """The lengths of the rows in each shard."""

    @property
    def shard_sizes(self) -> Sequence[int]: ...
    def lengths(self, shard: int, start: int, stop: int) -> IntArray:
        """Return the lengths of rows `start` to `stop` of a shard."""


class StoredLengths(Protocol):
    """Rows that are the sequences of a store, or parts of them; `lengths` are those of the rows."""

    @property
    def sequences(self) -> Sequences: ...
    def lengths(self, shard: int, start: int, stop: int) -> IntArray: ...


class StoredDocuments(ShardedLengths, StoredLengths, Protocol):
    """Both: the lengths of the documents in a store."""


@dataclass(frozen=True)
class RowUnits:
    """Each row takes up one unit."""

    source: ShardedLengths

    @property
    def shard_units(self) -> Sequence[int]:
        return self.source.shard_sizes

    def rows(self, shard: int, start: int, stop: int) -> tuple[int, IntArray]:
        return start, self.source.lengths(shard, start, stop)


@dataclass(frozen=True)
class StepUnits:
    """Each row takes up its sequence's number of time steps, and `per_row` units more.

    So two stretches of the same size take equally long to train on, though their numbers of rows may differ.
    """

    source: StoredLengths
    per_row: int = 0

    @cached_property
    def shard_units(self) -> Sequence[int]:
        shards = self.source.sequences.fields.shards
        return [shard.num_steps + self.per_row * shard.num_sequences for shard in shards]

    def rows(self, shard: int, start: int, stop: int) -> tuple[int, IntArray]:
        sequences = self.source.sequences
        first, last = (sequences.first_starting_at(shard, unit, self.per_row) for unit in (start, stop))
        return first, self.source.lengths(shard, first, last)
