"""Row units: positions in a shard, counted in rows or in time steps, and which rows start between two of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from stretto.store.sequences import IntArray
from stretto.windows.sequence_rows import SequenceRows


class UnitSource(Protocol):
    """The shards of a dataset, measured in some unit; each row takes up one unit or more, and rows may overlap."""

    @property
    def shard_units(self) -> Sequence[int]:
        """The size of each shard."""

    def rows(self, shard: int, start: int, stop: int) -> tuple[IntArray, IntArray]:
        """Return the indices and the lengths of the rows that start between `start` and `stop`."""


class ShardedLengths(Protocol):
    """The lengths of the rows in each shard."""

    @property
    def shard_sizes(self) -> Sequence[int]: ...
    def lengths(self, shard: int, start: int, stop: int) -> IntArray:
        """Return the lengths of rows `start` to `stop` of a shard."""


@dataclass(frozen=True)
class RowUnits:
    """Each row takes up one unit."""

    source: ShardedLengths

    @property
    def shard_units(self) -> Sequence[int]:
        return self.source.shard_sizes

    def rows(self, shard: int, start: int, stop: int) -> tuple[IntArray, IntArray]:
        return np.arange(start, stop), self.source.lengths(shard, start, stop)


@dataclass(frozen=True)
class StepUnits:
    """Each sequence takes up its number of time steps, and `per_sequence` units more after them.

        per_sequence = 2    |--seq 0--|..|-seq 1-|..|------seq 2------|..|
        rows                 |   |        |          |   |   |   |           start where their first time step is
        is_spread            |      |     |          |    |    |    |        or are spread over their sequence

    So two stretches of the same size take equally long to train on, though their numbers of rows may differ. If a row
    is a part of a sequence, its index is its first time step in the shard, otherwise that of the sequence.
    """

    source: SequenceRows
    per_sequence: int = 0
    is_spread: bool = False

    @cached_property
    def shard_units(self) -> Sequence[int]:
        shards = self.source.sequences.fields.shards
        return [shard.num_steps + self.per_sequence * shard.num_sequences for shard in shards]

    def rows(self, shard: int, start: int, stop: int) -> tuple[IntArray, IntArray]:
        sequences, stride = self.source.sequences, self.source.stride
        first, last = (sequences.first_starting_at(shard, unit, self.per_sequence) for unit in (start, stop))
        if stride is not None:
            first = max(0, first - 1)  # it starts before, but may have rows that start later
        boundaries = sequences.boundaries(shard, first, last)
        if stride is None:
            return np.arange(first, last), self.source.row_lengths(np.diff(boundaries))
        lengths = np.diff(boundaries)
        counts = self.source.counts(lengths)
        firsts, lasts = np.zeros_like(counts), counts.copy()
        # Of the sequences in between, all rows start between the two units.
        for index, numbers, unit in ((0, firsts, start), (-1, lasts, stop)) if last > first else ():
            offset = unit - int(boundaries[:-1][index]) - self.per_sequence * range(first, last)[index]
            numbers[index] = self._count_before(offset, int(lengths[index]), int(counts[index]))
        counts = lasts - firsts
        owners = np.repeat(np.arange(last - first), counts)
        numbers = np.arange(len(owners)) - np.repeat(counts.cumsum() - counts - firsts, counts)
        starts = boundaries[owners] + numbers * stride
        return starts, self.source.row_lengths(boundaries[owners + 1] - starts)

    def _count_before(self, offset: int, length: int, count: int) -> int:
        """Return how many of a sequence's `count` rows start less than `offset` units after it does."""
        # A row every `width / divisor` units. With billions of time steps, the product needs more than 64 bits.
        width, divisor = (max(1, length + self.per_sequence), count) if self.is_spread else (self.source.stride or 1, 1)
        return min(max(0, -(-offset * divisor // width)), count)
