"""Sequences: variable-length sequences of tokens or channels in the shards of a store, with or without targets.

values-00000.bin   |--seq 0--|-seq 1-|-----seq 2-----|      the time steps of all sequences, concatenated
ends-00000.bin     where each sequence ends, in time steps
targets-00000.bin  a class, or values, per sequence or per time step, if there are targets; or a sequence of classes
target_ends-00000.bin  where the targets of each sequence end, if they have a length of their own
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FiniteFloat, model_validator

from stretto.base.errors import DataError
from stretto.base.strict_model import StrictModel
from stretto.base.task import IGNORE_INDEX, TargetKind
from stretto.store.cache import Cache
from stretto.store.index import Store, damaged_index, parse_index
from stretto.store.pages import ByteRange
from stretto.store.vocabulary import VOCABULARY_FILE, Vocabulary, parse_vocabulary, token_dtype

IntArray = NDArray[np.int64]
# The dtypes in a shard's files, except that of tokens, which depends on the vocabulary's size (see `token_dtype`).
END_DTYPE = np.dtype("<u8")
CHANNEL_DTYPE = np.dtype("<f4")
CLASS_DTYPE = np.dtype("<i4")
_COUNTED_AT_ONCE = 1 << 20  # targets that are in memory while classes are counted
_SEARCHED_AT_ONCE = 1 << 12  # ends that are read at once to find a sequence


class Tokens(StrictModel):
    """Each time step is a token."""

    type: Literal["tokens"] = "tokens"
    num_tokens: int = Field(ge=1, le=2**32)  # the vocabulary's size
    shape: ClassVar[tuple[int, ...]] = ()  # of one time step

    @property
    def dtype(self) -> np.dtype[Any]:
        return token_dtype(self.num_tokens)


class NamedValues(StrictModel):
    """Values with names, NaN where missing; mean and std are those of the training data."""

    dtype: ClassVar[np.dtype[Any]] = CHANNEL_DTYPE
    names: tuple[str, ...] = Field(min_length=1, strict=False)
    mean: tuple[FiniteFloat, ...] = Field(strict=False)
    std: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = Field(strict=False)
    known_future: tuple[str, ...] = Field((), strict=False)  # channels whose values are known ahead of time
    static: tuple[str, ...] = Field((), strict=False)  # channels that are constant within a sequence

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not len(self.names) == len(set(self.names)) == len(self.mean) == len(self.std):
            raise ValueError("names must be unique, and mean and std need one entry for each name")
        if not {*self.known_future, *self.static} <= {*self.names} or {*self.known_future} & {*self.static}:
            raise ValueError("known_future and static must be different channels")
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.names),)


class Channels(NamedValues):
    """Each time step has one value per channel: a number, or the code of a category."""

    type: Literal["channels"] = "channels"
    # Names of the categories, by channel. The code of name i is i + 1, that of any other name 0; its mean is 0, its
    # std 1, so that codes are never scaled.
    categories: dict[str, Annotated[tuple[str, ...], Field(min_length=1, strict=False)]] = Field({}, strict=False)

    @model_validator(mode="after")
    def _check_categories(self) -> Self:
        for name, names in self.categories.items():
            if name not in self.names or len(set(names)) < len(names):
                raise ValueError(f"categories.{name} must have different names, and be a channel")
            index = self.names.index(name)
            if (self.mean[index], self.std[index]) != (0, 1):
                raise ValueError(f"{name} has codes, so its mean must be 0 and its std 1")
        return self

    @property
    def category_sizes(self) -> tuple[tuple[int, int], ...]:
        """The index and the number of names of each channel that has codes."""
        return tuple((i, len(self.categories[name])) for i, name in enumerate(self.names) if name in self.categories)


class Classes(StrictModel):
    """Each sequence, or each time step, has one of these classes as its target, or IGNORE_INDEX if it has none.

    With `own_length`, each sequence has any number of them; class 0 is then CTC's blank and never a target.
    """

    type: Literal["classes"] = "classes"
    names: tuple[str, ...] = Field(min_length=1, strict=False)
    per_step: bool = False
    own_length: bool = False
    dtype: ClassVar[np.dtype[Any]] = CLASS_DTYPE
    shape: ClassVar[tuple[int, ...]] = ()

    @property
    def kind(self) -> TargetKind:
        if self.own_length:
            return "sequence_per_row"
        return "class_per_step" if self.per_step else "class_per_row"


class TargetValues(NamedValues):
    """Each sequence, or each time step, has these values as its targets."""

    type: Literal["values"] = "values"
    per_step: bool = False
    own_length: ClassVar[bool] = False

    @property
    def kind(self) -> TargetKind:
        return "values_per_step" if self.per_step else "values_per_row"


StoredTargets = Classes | TargetValues


@dataclass(frozen=True)
class SharedProperties:
    """What two datasets must have in common so that one model can read both."""

    location: str  # where the data is or was, for messages
    values: Tokens | Channels
    targets: StoredTargets | None = None
    vocabulary: Vocabulary | None = None


class Shard(StrictModel):
    """The sizes of one shard."""

    num_sequences: int = Field(ge=1)
    num_steps: int = Field(ge=1)
    longest: int = Field(ge=1)  # time steps of the longest sequence
    num_targets: int = Field(0, ge=0)  # of all sequences, if targets have a length of their own; else 0


class Origin(StrictModel):
    """Which fields or columns of the original files held what, so that `stretto predict` can read others like them."""

    inputs: tuple[str, ...] = Field((), strict=False)  # empty for series, whose columns are the channels
    targets: tuple[str, ...] = Field((), strict=False)
    by: str | None = None  # the column that identifies a series
    time: str | None = None
    time_format: str | None = None  # how the times are written; None: ISO 8601, or numbers


class SequencesFields(StrictModel):
    """The part of the index that describes sequences."""

    kind: ClassVar[str] = "sequences"
    values: Tokens | Channels = Field(discriminator="type")
    targets: StoredTargets | None = Field(None, discriminator="type")
    num_bytes: int | None = None  # of the original text; None if the sequences were not made from text
    origin: Origin | None = None
    shards: tuple[Shard, ...] = Field(min_length=1, strict=False)


class StepRange(NamedTuple):
    """Time steps `start` to `stop` of a shard."""

    shard: int
    start: int
    stop: int


@dataclass(frozen=True)
class Sequences:
    """Sequences on disk or in object storage; nothing is loaded until it is read."""

    store: Store
    fields: SequencesFields
    vocabulary: Vocabulary | None  # of tokens that were made from text; else None

    @classmethod
    def open(cls, location: Path | str, cache: Cache | None = None) -> "Sequences":
        """Open what `stretto prepare sequences` or `series` wrote."""
        return cls.from_store(Store.open(location, cache))

    @classmethod
    def from_store(cls, store: Store) -> "Sequences":
        """Return the sequences in a store; raise DataError if it has none, or its index is invalid."""
        if store.kind != SequencesFields.kind:
            raise DataError(f"{store.location} holds no sequences (kind: {store.kind!r}); choose a different folder")
        fields = parse_index(SequencesFields, store.fields, store.location)
        for number, shard in enumerate(fields.shards):
            store.check_sizes(_file_sizes(fields, shard, number))
        has_vocabulary = any(file.name == VOCABULARY_FILE for file in store.files)
        vocabulary = parse_vocabulary(store.read_file(VOCABULARY_FILE), store.location) if has_vocabulary else None
        if vocabulary is not None and (fields.values.type != "tokens" or len(vocabulary) != fields.values.num_tokens):
            raise damaged_index(store.location, "the values don't match the vocabulary")
        return cls(store, fields, vocabulary)

    @property
    def location(self) -> str:
        """The folder or URL that the sequences were opened from."""
        return self.store.location

    @cached_property
    def shard_sizes(self) -> tuple[int, ...]:
        """The number of sequences in each shard."""
        return tuple(shard.num_sequences for shard in self.fields.shards)

    @property
    def num_sequences(self) -> int:
        """The number of sequences."""
        return sum(self.shard_sizes)

    @property
    def num_steps(self) -> int:
        """The total number of time steps."""
        return sum(shard.num_steps for shard in self.fields.shards)

    @property
    def mean_length(self) -> float:
        """The mean number of time steps of a sequence."""
        return self.num_steps / self.num_sequences

    @property
    def longest(self) -> int:
        """The number of time steps of the longest sequence."""
        return max(shard.longest for shard in self.fields.shards)

    @property
    def bytes_per_token(self) -> float | None:
        """The mean number of bytes of original text per token; None if the sequences were not made from text."""
        return None if self.fields.num_bytes is None else self.fields.num_bytes / self.num_steps

    def boundaries(self, shard: int, start: int, stop: int) -> IntArray:
        """Return where sequence `start` begins (the previous one ends there), then where `start` to `stop` end."""
        boundaries = self._read_items("ends", END_DTYPE, [(shard, max(start - 1, 0), stop)])[0].astype(np.int64)
        boundaries = boundaries if start else np.concatenate([[0], boundaries])
        sizes, lengths = self.fields.shards[shard], np.diff(boundaries)
        if lengths.min(initial=1) < 1 or lengths.max(initial=1) > sizes.longest or boundaries[-1] > sizes.num_steps:
            raise self._invalid("ends", shard, "a sequence has an impossible end")
        return boundaries

    def first_starting_at(self, shard: int, unit: int, per_row: int = 0) -> int:
        """Return the first sequence that starts at `unit` or later; the number of sequences if none does.

        A sequence takes up its number of time steps and `per_row` units more. Interpolation mostly needs one read.
        """
        sizes = self.fields.shards[shard]
        # Sequence `low` starts before `unit`, sequence `high` doesn't.
        low, high = -1, sizes.num_sequences
        low_unit, high_unit = -1, sizes.num_steps + per_row * sizes.num_sequences
        if unit <= 0:
            return 0
        has_halved = True
        while high - low > 1:
            # Halving in between bounds the number of reads for any data.
            has_halved = not has_halved
            share = 0.5 if has_halved else (unit - low_unit) / max(1, high_unit - low_unit)
            middle = low + int((high - low) * share)
            first = min(max(middle - _SEARCHED_AT_ONCE // 2, low + 1), high - 1)
            stop = min(first + _SEARCHED_AT_ONCE, high)
            starts = self.boundaries(shard, first, stop)[:-1] + per_row * np.arange(first, stop)
            place = int(np.searchsorted(starts, unit))
            if place < len(starts):
                high, high_unit = first + place, int(starts[place])
            if place > 0:
                low, low_unit = first + place - 1, int(starts[place - 1])
        return high

    def step_ranges(self, rows: Sequence[tuple[int, int]]) -> list[StepRange]:
        """Return the range of time steps of each sequence; a row is a shard and an index in it."""
        for shard, index in rows:
            if not (0 <= shard < len(self.shard_sizes) and 0 <= index < self.shard_sizes[shard]):
                raise DataError(f"{self.location} has no sequence {index:,} in shard {shard}; both are counted from 0")
        items = self._read_items("ends", END_DTYPE, [(shard, max(index - 1, 0), index + 1) for shard, index in rows])
        step_ranges = []
        for (shard, index), ends in zip(rows, items, strict=True):
            steps = StepRange(shard, int(ends[0]) if index else 0, int(ends[-1]))
            if not steps.start < steps.stop <= self.fields.shards[shard].num_steps:
                raise self._invalid("ends", shard, f"sequence {index} has an impossible end")
            step_ranges.append(steps)
        return step_ranges

    def read(self, step_ranges: Sequence[StepRange]) -> list[NDArray[Any]]:
        """Return the values of each range: tokens `[time]`, or channels `[time, channels]`."""
        values = self.fields.values
        width = math.prod(values.shape)
        ranges = [(shard, start * width, stop * width) for shard, start, stop in step_ranges]
        arrays = [items.reshape(-1, *values.shape) for items in self._read_items("values", values.dtype, ranges)]
        # Look for invalid tokens, unless all values of the dtype are valid.
        if isinstance(values, Tokens) and values.num_tokens <= np.iinfo(values.dtype).max:
            for steps, tokens in zip(step_ranges, arrays, strict=True):
                if tokens.max(initial=0) >= values.num_tokens:
                    reason = f"token {tokens.max()} >= num_tokens={values.num_tokens}"
                    raise self._invalid("values", steps.shard, reason)
        if isinstance(values, Channels) and values.categories:
            self._check_codes(values, step_ranges, arrays)
        return arrays

    def _check_codes(
        self, channels: Channels, step_ranges: Sequence[StepRange], arrays: Sequence[NDArray[Any]]
    ) -> None:
        """Raise if a channel of codes has anything else than codes; NaN is a missing one."""
        for steps, array in zip(step_ranges, arrays, strict=True):
            for index, size in channels.category_sizes:
                codes = array[:, index]
                is_wrong = ~np.isnan(codes) & ~((codes >= 0) & (codes <= size) & (codes == np.floor(codes)))
                if is_wrong.any():
                    reason = f"{codes[is_wrong][0]:g} is not a code of {channels.names[index]!r}"
                    raise self._invalid("values", steps.shard, reason)

    def read_row_targets(self, rows: Sequence[tuple[int, int]]) -> list[NDArray[Any]]:
        """Return the targets of sequences, if each has its own: a class, classes `[length]`, or values `[values]`.

        A row is a shard and an index in it.
        """
        if self.fields.targets is not None and self.fields.targets.own_length:
            return self._read_target_sequences(rows)
        return [targets[0] for targets in self._read_targets([(shard, index, index + 1) for shard, index in rows])]

    def _read_target_sequences(self, rows: Sequence[tuple[int, int]]) -> list[NDArray[Any]]:
        ranges = [(shard, max(index - 1, 0), index + 1) for shard, index in rows]
        target_ranges = []
        for (shard, index), ends in zip(rows, self._read_items("target_ends", END_DTYPE, ranges), strict=True):
            start, stop = int(ends[0]) if index else 0, int(ends[-1])
            if not start <= stop <= self.fields.shards[shard].num_targets:
                raise self._invalid("target_ends", shard, f"the targets of sequence {index} have an impossible end")
            target_ranges.append((shard, start, stop))
        arrays = iter(self._read_targets([steps for steps in target_ranges if steps[1] < steps[2]]))
        return [next(arrays) if start < stop else np.zeros(0, CLASS_DTYPE) for _, start, stop in target_ranges]

    def read_step_targets(self, step_ranges: Sequence[StepRange]) -> list[NDArray[Any]]:
        """Return the targets of time steps, if each has its own: classes `[time]`, or values `[time, values]`."""
        return self._read_targets(step_ranges)

    def count_classes(self) -> IntArray:
        """Return how many targets each class has, and then how many sequences or time steps have none."""
        targets = self.fields.targets
        assert isinstance(targets, Classes), "the caller checks"
        counts = np.zeros(len(targets.names) + 1, np.int64)
        for shard, size in enumerate(self.fields.shards):
            num_items = size.num_steps if targets.per_step else size.num_sequences
            num_items = size.num_targets if targets.own_length else num_items
            for start in range(0, num_items, _COUNTED_AT_ONCE):
                (classes,) = self._read_targets([(shard, start, min(start + _COUNTED_AT_ONCE, num_items))])
                known = np.where(classes == IGNORE_INDEX, len(targets.names), classes)
                counts += np.bincount(known, minlength=len(counts))
        return counts

    def _read_targets(self, ranges: Iterable[tuple[int, int, int]]) -> list[NDArray[Any]]:
        targets = self.fields.targets
        assert targets is not None, "the caller checks"
        width, ranges = math.prod(targets.shape), list(ranges)
        item_ranges = [(shard, start * width, stop * width) for shard, start, stop in ranges]
        arrays = [
            items.reshape(-1, *targets.shape) for items in self._read_items("targets", targets.dtype, item_ranges)
        ]
        if isinstance(targets, Classes):
            for (shard, *_), classes in zip(ranges, arrays, strict=True):
                is_wrong = ((classes < 0) & (classes != IGNORE_INDEX)) | (classes >= len(targets.names))
                if is_wrong.any():
                    reason = f"{classes[is_wrong][0]} is not one of the {len(targets.names)} classes"
                    raise self._invalid("targets", shard, reason)
        return arrays

    def _read_items(
        self, prefix: str, dtype: np.dtype[Any], ranges: Iterable[tuple[int, int, int]]
    ) -> list[NDArray[Any]]:
        """Return items `start` to `stop` of a shard's values, ends or targets, for each range (shard, start, stop)."""
        size = dtype.itemsize
        byte_ranges = [ByteRange(shard_file(prefix, shard), start * size, stop * size) for shard, start, stop in ranges]
        return [content.view(dtype) for content in self.store.pages.read(byte_ranges)]

    def _invalid(self, prefix: str, shard: int, reason: str) -> DataError:
        """Return the error for a file with a valid checksum but values that `stretto prepare` never writes."""
        problem = f"{shard_file(prefix, shard)} is invalid ({reason})"
        return DataError(f"{self.location}: {problem}; do not trust this store, and prepare the data again")


def _file_sizes(fields: SequencesFields, shard: Shard, number: int) -> dict[str, int]:
    """Return the size in bytes of each file that a shard must have, by its name."""
    step_bytes = fields.values.dtype.itemsize * math.prod(fields.values.shape)
    sizes = {
        shard_file("values", number): shard.num_steps * step_bytes,
        shard_file("ends", number): shard.num_sequences * END_DTYPE.itemsize,
    }
    if fields.targets is not None:
        count = shard.num_steps if fields.targets.per_step else shard.num_sequences
        if fields.targets.own_length:
            count = shard.num_targets
            sizes[shard_file("target_ends", number)] = shard.num_sequences * END_DTYPE.itemsize
        target_bytes = fields.targets.dtype.itemsize * math.prod(fields.targets.shape)
        sizes[shard_file("targets", number)] = count * target_bytes
    return sizes


def shard_file(prefix: str, number: int) -> str:
    """Return the name of a shard's values, ends or targets file."""
    return f"{prefix}-{number:05}.bin"
