"""Sequences: rows of unequal length in shards, of tokens or of channels, with labels or without.

values-00000.bin   |--seq 0--|-seq 1-|-----seq 2-----|      the steps of all its sequences, end to end
ends-00000.bin     where each of them ends, in steps
labels-00000.bin   a label for each, where there are any
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FiniteFloat, model_validator

from stretto.base.errors import DataError
from stretto.base.strict_model import StrictModel
from stretto.store.cache import Cache
from stretto.store.index import Store, damaged_index, parse_index
from stretto.store.pages import ByteRange, Bytes
from stretto.store.vocabulary import FILE as VOCABULARY
from stretto.store.vocabulary import Vocabulary, parse_vocabulary, token_dtype

IntArray = NDArray[np.int64]
KIND = "sequences"
ENDS = np.dtype("<u8")
VALUES = np.dtype("<f4")
CLASSES = np.dtype("<i8")


class Tokens(StrictModel):
    """Each step is a token."""

    type: Literal["tokens"] = "tokens"
    num_tokens: int = Field(ge=1, le=2**32)

    @property
    def dtype(self) -> np.dtype[Any]:
        return token_dtype(self.num_tokens)

    @property
    def shape(self) -> tuple[int, ...]:
        return ()


class Channels(StrictModel):
    """Each step has a number for each channel, NaN where it is missing; mean and spread are those of training data."""

    type: Literal["channels"] = "channels"
    names: tuple[str, ...] = Field(min_length=1, strict=False)
    mean: tuple[FiniteFloat, ...] = Field(strict=False)
    std: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = Field(strict=False)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not len(self.names) == len(set(self.names)) == len(self.mean) == len(self.std):
            raise ValueError("names, mean and std are not one for each channel")
        return self

    @property
    def dtype(self) -> np.dtype[Any]:
        return VALUES

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.names),)


class Classes(StrictModel):
    """Each sequence has one of these labels."""

    type: Literal["classes"] = "classes"
    names: tuple[str, ...] = Field(min_length=1, strict=False)

    @property
    def dtype(self) -> np.dtype[Any]:
        return CLASSES


class Shard(StrictModel):
    """One shard, in numbers."""

    num_sequences: int = Field(ge=1)
    num_steps: int = Field(ge=1)
    longest: int = Field(ge=1)


class Origin(StrictModel):
    """Which fields of its files a store was prepared from: how others like them are read."""

    sequence: str | None = None  # none of series, whose columns are the channels
    label: str | None = None
    by: str | None = None
    time: str | None = None


class SequencesFields(StrictModel):
    """What the index says of sequences."""

    values: Tokens | Channels = Field(discriminator="type")
    labels: Classes | None = None
    num_bytes: int | None = None  # of the text that tokens came from
    origin: Origin | None = None
    shards: tuple[Shard, ...] = Field(min_length=1, strict=False)


class StepRange(NamedTuple):
    """Some steps of a shard."""

    shard: int
    start: int
    stop: int


@dataclass(frozen=True)
class Sequences:
    """Sequences on disk or in object storage, read where and when they are asked for."""

    store: Store
    fields: SequencesFields
    vocabulary: Vocabulary | None  # of tokens that came from text

    @classmethod
    def open(cls, location: Path | str, cache: Cache | None = None) -> "Sequences":
        """Open what `stretto prepare sequences` or `series` wrote."""
        return cls.from_store(Store.open(location, cache))

    @classmethod
    def from_store(cls, store: Store) -> "Sequences":
        """Return the sequences of a store; check what its index says of them."""
        if store.kind != KIND:
            raise DataError(f"{store.location} holds {store.kind}, not {KIND}; give another folder")
        fields = parse_index(SequencesFields, store.fields, store.location)
        sizes = {file.name: file.num_bytes for file in store.files}
        for number, shard in enumerate(fields.shards):
            for name, size in _sizes(fields, shard, number).items():
                if sizes.get(name) != size:
                    raise damaged_index(store.location, f"{name} has {sizes.get(name)} bytes, not {size}")
        has_vocabulary = VOCABULARY in sizes
        vocabulary = parse_vocabulary(store.read_file(VOCABULARY), store.location) if has_vocabulary else None
        if vocabulary is not None and (fields.values.type != "tokens" or len(vocabulary) != fields.values.num_tokens):
            raise damaged_index(store.location, "its vocabulary has another size")
        return cls(store, fields, vocabulary)

    @property
    def location(self) -> str:
        """The folder or URL that it was opened from."""
        return self.store.location

    @cached_property
    def shard_sizes(self) -> tuple[int, ...]:
        """How many sequences each shard has."""
        return tuple(shard.num_sequences for shard in self.fields.shards)

    @property
    def num_sequences(self) -> int:
        """How many sequences there are."""
        return sum(self.shard_sizes)

    @property
    def num_steps(self) -> int:
        """How many steps all sequences have together."""
        return sum(shard.num_steps for shard in self.fields.shards)

    @property
    def mean_length(self) -> float:
        """How many steps a sequence has on average."""
        return self.num_steps / self.num_sequences

    @property
    def longest(self) -> int:
        """How many steps the longest has."""
        return max(shard.longest for shard in self.fields.shards)

    @property
    def bytes_per_token(self) -> float | None:
        return None if self.fields.num_bytes is None else self.fields.num_bytes / self.num_steps

    def ends(self, shard: int, start: int, stop: int) -> IntArray:
        """Return where the sequences from `start` up to `stop` end, and before them where the first begins."""
        first = max(start - 1, 0)
        content = self._read([ByteRange(shard_file("ends", shard), first * ENDS.itemsize, stop * ENDS.itemsize)])[0]
        ends = content.view(ENDS).astype(np.int64)
        ends = ends if start else np.concatenate([[0], ends])
        numbers, lengths = self.fields.shards[shard], np.diff(ends)
        if lengths.min(initial=1) < 1 or lengths.max(initial=1) > numbers.longest or ends[-1] > numbers.num_steps:
            raise self._corrupt(shard_file("ends", shard), "sequences end where they can't")
        return ends

    def step_ranges(self, rows: Sequence[tuple[int, int]]) -> list[StepRange]:
        """Return where each of some sequences lies, given by shard and number in it."""
        for shard, number in rows:
            if not (0 <= shard < len(self.shard_sizes) and 0 <= number < self.shard_sizes[shard]):
                raise DataError(f"{self.location} has no sequence {number:,} in shard {shard}; count from 0")
        spans = [
            ByteRange(shard_file("ends", shard), max(number - 1, 0) * ENDS.itemsize, (number + 1) * ENDS.itemsize)
            for shard, number in rows
        ]
        places = []
        for (shard, number), content in zip(rows, self._read(spans), strict=True):
            ends = content.view(ENDS)
            place = StepRange(shard, int(ends[0]) if number else 0, int(ends[-1]))
            if not place.start < place.stop <= self.fields.shards[shard].num_steps:
                raise self._corrupt(shard_file("ends", shard), f"sequence {number} ends where it can't")
            places.append(place)
        return places

    def read(self, places: Sequence[StepRange]) -> list[NDArray[Any]]:
        """Return the steps of each place, `[steps]` of tokens or `[steps, channels]` of numbers."""
        values = self.fields.values
        size = _step_bytes(values)
        spans = [
            ByteRange(shard_file("values", place.shard), place.start * size, place.stop * size) for place in places
        ]
        found = [content.view(values.dtype).reshape(-1, *values.shape) for content in self._read(spans)]
        if isinstance(values, Tokens) and values.num_tokens <= np.iinfo(values.dtype).max:
            for span, tokens in zip(spans, found, strict=True):
                if tokens.max(initial=0) >= values.num_tokens:
                    raise self._corrupt(span.file, f"token {tokens.max()} is beyond the {values.num_tokens} there are")
        return found

    def read_labels(self, rows: Sequence[tuple[int, int]]) -> IntArray:
        """Return the class of each of some sequences, given by shard and number in it."""
        size = CLASSES.itemsize
        spans = [ByteRange(shard_file("labels", shard), number * size, (number + 1) * size) for shard, number in rows]
        labels = np.array([int(content.view(CLASSES)[0]) for content in self._read(spans)], np.int64)
        names = () if self.fields.labels is None else self.fields.labels.names
        for span, label in zip(spans, labels.tolist(), strict=True):
            if not 0 <= label < len(names):
                raise self._corrupt(span.file, f"label {label} is none of the {len(names)} there are")
        return labels

    def _corrupt(self, file: str, reason: str) -> DataError:
        """The error for files that are whole but don't mean anything: no preparation of ours wrote them."""
        return DataError(f"{self.location}: {file} is wrong ({reason}); don't trust it, and prepare the data again")

    def _read(self, spans: Sequence[ByteRange]) -> list[Bytes]:
        return self.store.pages.read(spans)


def _sizes(fields: SequencesFields, shard: Shard, number: int) -> dict[str, int]:
    """The files that a shard must have, with their sizes."""
    sizes = {
        shard_file("values", number): shard.num_steps * _step_bytes(fields.values),
        shard_file("ends", number): shard.num_sequences * ENDS.itemsize,
    }
    if fields.labels is not None:
        sizes[shard_file("labels", number)] = shard.num_sequences * CLASSES.itemsize
    return sizes


def _step_bytes(values: Tokens | Channels) -> int:
    return values.dtype.itemsize * math.prod(values.shape)


def shard_file(prefix: str, number: int) -> str:
    """Return the name of a shard's file of values, ends or labels."""
    return f"{prefix}-{number:05}.bin"
