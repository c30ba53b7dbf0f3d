"""SequenceRows: where the rows of a store's sequences start, and how long they are."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, chain

import numpy as np

from stretto.store.lru_cache import LruCache, lru_cache_field
from stretto.store.sequences import IntArray, Sequences, StepRange

_SEQUENCES_PER_READ = 1 << 16  # how many sequences' lengths are read at once to count their rows
_MAX_COUNTED = 1 << 20  # with more sequences,
_MAX_SHARDS_COUNTED = 64  # or in more shards, the number of rows is estimated,
_NUM_SAMPLES = 5  # from so many places of the data: a page of each, which every node fetches,
_SAMPLE_SEQUENCES = 1 << 14  # and so many sequences there
_SHARDS_IN_MEMORY = 8  # for how many shards it is kept where each sequence starts


@dataclass(frozen=True)
class SequenceRows:
    """The rows of sequences: one starts every `stride` time steps, as long as `min_steps` are left.

    The index of a store doesn't tell how many there are. Only what needs an index of a row within its shard reads the
    lengths of that shard's sequences; an order of batches names a part of a sequence by its first time step instead.
    """

    sequences: Sequences
    stride: int | None = None  # None: each sequence is a row
    min_steps: int = 1
    max_steps: int | None = None  # of a row
    num_ahead: int = 0  # the time steps at the end of a sequence that are targets only
    _tables: LruCache[tuple[IntArray, IntArray]] = lru_cache_field(_SHARDS_IN_MEMORY)  # by shard: `_table`

    @property
    def max_density(self) -> Fraction:
        """The most rows that a sequence has for each of its time steps but the first; `min_steps` is 2 or more."""
        assert self.stride is not None and self.min_steps > 1
        # With each row more, the density comes closer to one row per stride, from above or from below.
        extra = (self.sequences.longest - self.min_steps) // self.stride
        shortest = self.min_steps - 1
        return max(Fraction(1, shortest), Fraction(1 + extra, shortest + extra * self.stride))

    def counts(self, lengths: IntArray) -> IntArray:
        """Return the number of rows of sequences with these lengths."""
        if self.stride is None:
            return np.ones_like(lengths)
        return np.maximum((lengths - self.min_steps) // self.stride + 1, 0)

    def row_lengths(self, num_left: IntArray) -> IntArray:
        """Return the lengths of rows that start so many time steps before the end of their sequence."""
        lengths = num_left - self.num_ahead
        return lengths if self.max_steps is None else np.minimum(lengths, self.max_steps)

    @cached_property
    def shard_sizes(self) -> tuple[int, ...]:
        """The number of rows in each shard; for parts of sequences, it takes the lengths of all sequences."""
        if self.stride is None:
            return self.sequences.shard_sizes
        return tuple(sum(self._counts(shard)) for shard in range(len(self.sequences.shard_sizes)))

    @property
    def is_counted(self) -> bool:
        """Whether `approximate_count` is exact."""
        has_few_shards = len(self.sequences.shard_sizes) <= _MAX_SHARDS_COUNTED
        return self.stride is None or (has_few_shards and self.sequences.num_sequences <= _MAX_COUNTED)

    @cached_property
    def approximate_count(self) -> int:
        """The number of rows; for large data it is estimated, from sequences at places all over the data."""
        if self.is_counted or self.stride is None:
            return sum(self.shard_sizes)
        shards = self.sequences.fields.shards
        edges = np.array([0, *accumulate(shard.num_sequences for shard in shards)])
        num_rows = num_steps = 0
        for number in range(_NUM_SAMPLES):
            place = self.sequences.num_sequences * (2 * number + 1) // (2 * _NUM_SAMPLES)
            shard = int(np.searchsorted(edges, place, side="right")) - 1
            start = place - int(edges[shard])
            stop = min(start + _SAMPLE_SEQUENCES, shards[shard].num_sequences)
            lengths = np.diff(self.sequences.boundaries(shard, start, stop))
            num_rows += int(self.counts(lengths).sum())
            num_steps += int(lengths.sum())
        # A sequence has (length - min_steps + 1) / stride rows or more, so this is the least that shards can have.
        least = sum(max(0, size.num_steps - (self.min_steps - 1) * size.num_sequences) for size in shards)
        return max(1, -(-least // self.stride), num_rows * self.sequences.num_steps // num_steps)

    def has_rows(self, count: int) -> bool:
        """Return whether there are `count` rows or more; only as many lengths are read as that takes."""
        all_counts = chain.from_iterable(self._counts(shard) for shard in range(len(self.sequences.shard_sizes)))
        return any(total >= count for total in accumulate(all_counts))

    def lengths(self, shard: int, start: int, stop: int) -> IntArray:
        """Return the lengths of rows `start` to `stop` of a shard."""
        if self.stride is None:
            return self.row_lengths(np.diff(self.sequences.boundaries(shard, start, stop)))
        step_ranges = self.step_ranges([(shard, index) for index in range(start, stop)])
        return np.array([steps.stop - steps.start for steps in step_ranges], np.int64)

    def locate(self, shard: int, index: int) -> tuple[int, int]:
        """Return a row's sequence, as an index in the shard, and the row's number within the sequence."""
        _, rows_before = self._table(shard)
        sequence = int(np.searchsorted(rows_before, index, side="right")) - 1
        return sequence, index - int(rows_before[sequence])

    def step_ranges(self, rows: Sequence[tuple[int, int]]) -> list[StepRange]:
        """Return the time steps of each row; a row is a shard and an index in it."""
        # Shard by shard, so that each shard's lengths are read once, even if not all of them fit into memory.
        step_ranges = {row: self._step_range(*row) for row in sorted(rows)}
        return [step_ranges[row] for row in rows]

    def _step_range(self, shard: int, index: int) -> StepRange:
        boundaries, _ = self._table(shard)
        sequence, number = self.locate(shard, index)
        start = int(boundaries[sequence]) + number * (self.stride or 0)
        return StepRange(shard, start, start + int(self.row_lengths(boundaries[sequence + 1] - start)))

    def _counts(self, shard: int) -> Iterator[int]:
        """Yield the number of rows of some sequences after another."""
        size = self.sequences.shard_sizes[shard]
        for start in range(0, size, _SEQUENCES_PER_READ):
            boundaries = self.sequences.boundaries(shard, start, min(size, start + _SEQUENCES_PER_READ))
            yield int(self.counts(np.diff(boundaries)).sum())

    def _table(self, shard: int) -> tuple[IntArray, IntArray]:
        """Return a shard's boundaries of sequences, and the number of rows before each sequence, then the total."""
        return self._tables.get(shard, lambda: self._read_table(shard))

    def _read_table(self, shard: int) -> tuple[IntArray, IntArray]:
        boundaries = self.sequences.boundaries(shard, 0, self.sequences.shard_sizes[shard])
        return boundaries, np.concatenate([[0], self.counts(np.diff(boundaries)).cumsum()])
