"""Items: the rows that batches are made from (in memory, sequences of tokens, or sliding windows)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.base.errors import DataError
from stretto.base.fingerprint import fingerprint
from stretto.base.task import Task, has_own_length
from stretto.base.window import IGNORE_INDEX
from stretto.store.sequences import Channels, IntArray, Sequences, StepRange, Tokens
from stretto.windows.forecast import ForecastTransform
from stretto.windows.sequence_rows import SequenceRows

RowId = tuple[int, int]
"""A row as (shard, index in the shard)."""


Payload = tuple[Tensor | None, Tensor | None]  # inputs and targets
_ROWS_PER_READ = 1 << 16  # how many rows' lengths are read at once to find the longest


class Items(ABC):
    """Rows of different lengths with inputs and targets: what `Batches` are made from.

    Subclass it for your own data. Rows are in shards; data in memory has a single shard. What a row contains must
    depend on nothing but its shard and index: batches are read in any order, by any rank, and again after a resume.
    """

    @property
    @abstractmethod
    def task(self) -> Task:
        """The kind and size of inputs and targets."""

    @property
    @abstractmethod
    def shard_sizes(self) -> Sequence[int]:
        """The number of rows in each shard."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """The number of time steps of the longest row."""

    @property
    @abstractmethod
    def mean_length(self) -> float:
        """The mean number of time steps of a row, approximately."""

    @abstractmethod
    def lengths(self, shard: int, start: int, stop: int) -> IntArray:
        """Return the number of time steps of rows `start` to `stop` of a shard."""

    @abstractmethod
    def read(self, rows: Sequence[RowId], num_steps: int, *, inputs: bool, targets: bool) -> Payload:
        """Return inputs and targets `[num_steps, rows, ...]`, padded; None for what is not requested.

        After a row's end, and where a time step has no target, targets are -100, or NaN if they are floats. Targets
        per row are at the row's last time step. Those with a length of their own (`sequence_per_row`) are padded to
        any length.
        """

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes; empty if they have none."""
        return ()

    @property
    def categories(self) -> Mapping[str, tuple[str, ...]]:
        """The names of the categories of each text input, by its column, in the order of the task's categories."""
        return {}

    @property
    def location(self) -> str:
        """Where the data is, for messages."""
        return type(self).__name__

    @property
    def bytes_per_token(self) -> float | None:
        """The mean number of bytes of text per token; None if the data is not text."""
        return None

    @property
    def digest(self) -> str:
        """A hash by which a resumed run recognizes its data; by default of the task and the number of rows only."""
        return fingerprint([str(self.task), list(self.shard_sizes), self.longest])

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield each row as a record with `inputs`, an array, and, unless they are the next token, `targets`.

        `prepare_sequences` writes them to a store. Classes have their names, and missing targets are None. With
        categories, which have their names too, there is a field for each input: `inputs.0`, `inputs.1` and so on.
        """
        for shard, size in enumerate(self.shard_sizes):
            for start in range(0, size, _ROWS_PER_READ):
                lengths = self.lengths(shard, start, min(size, start + _ROWS_PER_READ)).tolist()
                for index, length in enumerate(lengths, start):
                    x, targets = self.read([(shard, index)], length, inputs=True, targets=True)
                    assert x is not None and targets is not None
                    yield self._record(x[:, 0], targets[:, 0])

    def _record(self, x: Tensor, targets: Tensor) -> dict[str, Any]:
        task = self.task
        if task.targets == "next_token":
            return {"inputs": torch.cat([x, targets[-1:]]).numpy()}
        targets = targets[-1] if task.is_per_row else targets
        inputs: dict[str, Any] = self._input_columns(x) if task.categories else {"inputs": x.numpy()}
        if not task.has_classes:
            values = np.where(targets.isnan(), None, targets.numpy())  # type: ignore[call-overload]
            return {**inputs, "targets": values.tolist()}
        names = self.labels or [str(number) for number in range(task.num_outputs)]
        named = [None if number == IGNORE_INDEX else names[number] for number in targets.reshape(-1).tolist()]
        if has_own_length(task.targets):
            named = [name for name in named if name is not None]
        return {**inputs, "targets": named[0] if task.is_per_row else named}

    def _input_columns(self, x: Tensor) -> dict[str, Any]:
        """Return each input of a row by itself: numbers, or the names of categories, None where there is none."""
        columns: list[list[Any]] = x.T.tolist()
        for category, names in zip(self.task.categories, self.categories.values(), strict=True):
            for index in category.inputs:
                columns[index] = [names[int(code) - 1] if code else None for code in columns[index]]
        return {f"inputs.{index}": column for index, column in enumerate(columns)}

    def find_longest(self) -> RowId:
        """Return the longest row, for a message."""
        for shard, size in enumerate(self.shard_sizes):
            if self._longest_in(shard) < self.longest:
                continue
            for start in range(0, size, _ROWS_PER_READ):
                lengths = self.lengths(shard, start, min(size, start + _ROWS_PER_READ))
                matches = np.flatnonzero(lengths == self.longest)
                if len(matches):
                    return shard, start + int(matches[0])
        return 0, 0

    def _longest_in(self, shard: int) -> int:
        """Return an upper bound on the lengths in a shard, so that only few shards are searched for the longest row."""
        return self.longest


class SingleShardItems(Items):
    """Rows whose lengths are all known, in a single shard."""

    @property
    @abstractmethod
    def num_steps(self) -> IntArray:
        """The number of time steps of each row."""

    @property
    def shard_sizes(self) -> Sequence[int]:
        return (len(self.num_steps),)

    @cached_property
    def longest(self) -> int:
        return int(self.num_steps.max())

    @cached_property
    def mean_length(self) -> float:
        return float(self.num_steps.mean())

    def lengths(self, shard: int, start: int, stop: int) -> IntArray:
        return self.num_steps[start:stop]


@dataclass(frozen=True)
class StoredItems:
    """Rows from a store of sequences."""

    sequences: Sequences

    @property
    def categories(self) -> Mapping[str, tuple[str, ...]]:
        values = self.sequences.fields.values
        if not isinstance(values, Channels):
            return {}
        return {name: values.categories[name] for name in values.names if name in values.categories}

    @property
    def location(self) -> str:
        return self.sequences.location

    @property
    def digest(self) -> str:
        return self.sequences.store.digest

    @property
    def bytes_per_token(self) -> float | None:
        return self.sequences.bytes_per_token


@dataclass(frozen=True)
class _SequenceItems(StoredItems):
    """Each sequence is a row, at most as long as the sequence."""

    @property
    def shard_sizes(self) -> Sequence[int]:
        return self.sequences.shard_sizes

    @property
    def longest(self) -> int:
        return self.sequences.longest

    @property
    def mean_length(self) -> float:
        return self.sequences.mean_length

    def lengths(self, shard: int, start: int, stop: int) -> IntArray:
        return np.diff(self.sequences.boundaries(shard, start, stop))

    def _longest_in(self, shard: int) -> int:
        return self.sequences.fields.shards[shard].longest


@dataclass(frozen=True)
class InputItems(_SequenceItems):
    """Each sequence is a row that has only inputs; `LabeledItems` adds targets."""

    masks: bool = False  # for channels: add one input per channel, 1 where its value is present
    scale: bool = True  # for channels: with the mean and std of the training data

    @cached_property
    def scaler(self) -> ForecastTransform | None:
        """Scales channels to inputs; None for tokens, which are inputs as they are."""
        values = self.sequences.fields.values
        if not isinstance(values, Channels):
            return None
        count = len(values.names)
        mean, std = (values.mean, values.std) if self.scale else ((0.0,) * count, (1.0,) * count)
        # Only its inputs are used. A row has no horizon, so that nothing is known ahead of it.
        return ForecastTransform(mean, std, tuple(range(count)), masks=self.masks, categories=values.category_sizes)

    def inputs(self, step_ranges: Sequence[StepRange], num_steps: int) -> Tensor:
        """Return the inputs in some ranges `[time, batch, ...]`, padded to `num_steps` time steps."""
        rows, scaler = self.sequences.read(step_ranges), self.scaler
        return pad(rows if scaler is None else [scaler.inputs(values) for values in rows], num_steps, 0)


@dataclass(frozen=True)
class NextTokenItems(_SequenceItems, Items):
    """Each sequence of tokens is a row; the target of each time step is the next token."""

    def __post_init__(self) -> None:
        location = self.sequences.location
        if self.sequences.fields.values.type != "tokens":
            raise DataError(f"{location} holds channels, not tokens; use data.feed='lanes' or 'forecast'")
        if self.longest < 1:
            problem = "has no sequence of two or more tokens, so there is nothing to predict"
            raise DataError(f"{location} {problem}; use longer sequences")

    @property
    def task(self) -> Task:
        values = self.sequences.fields.values
        assert isinstance(values, Tokens)
        return Task.language(values.num_tokens)

    @property
    def longest(self) -> int:
        return super().longest - 1

    def lengths(self, shard: int, start: int, stop: int) -> IntArray:
        return super().lengths(shard, start, stop) - 1

    def read(self, rows: Sequence[RowId], num_steps: int, *, inputs: bool, targets: bool) -> Payload:
        """Return the sequences without their last token as inputs, and without their first as targets."""
        sequences = self.sequences.read(self.sequences.step_ranges(rows))
        return pad_next_tokens(sequences, num_steps, inputs=inputs, targets=targets)


class PartItems(Items):
    """Rows that are parts of a store's sequences; nothing is read to know where they are until a row is needed."""

    @property
    @abstractmethod
    def sequence_rows(self) -> SequenceRows:
        """Where the rows start."""

    @abstractmethod
    def read_parts(self, step_ranges: Sequence[StepRange], num_steps: int, *, inputs: bool, targets: bool) -> Payload:
        """Return what `read` does, for rows of which the time steps are known."""

    @property
    def shard_sizes(self) -> Sequence[int]:
        """The number of rows in each shard. It takes the lengths of all sequences, so training doesn't need it."""
        return self.sequence_rows.shard_sizes

    def lengths(self, shard: int, start: int, stop: int) -> IntArray:
        return self.sequence_rows.lengths(shard, start, stop)

    def read(self, rows: Sequence[RowId], num_steps: int, *, inputs: bool, targets: bool) -> Payload:
        """Return the rows and their targets."""
        return self.read_parts(self.sequence_rows.step_ranges(rows), num_steps, inputs=inputs, targets=targets)


@dataclass(frozen=True)
class SlidingWindows(PartItems, StoredItems, Items):
    """Each row is a window of `context` time steps of a series; the values that follow are targets.

    A window starts every `stride` time steps. Only its last time step has targets; with `every_step`, all do. With a
    season, the first `season - 1` have none: the values one season before their targets are outside of the window.
    """

    forecast: ForecastTransform
    context: int
    stride: int = 1
    every_step: bool = False

    def __post_init__(self) -> None:
        if min(self.context, self.stride) < 1:
            raise DataError(f"context={self.context} and stride={self.stride} must both be at least 1")
        if self.forecast.season > self.context:
            raise DataError(f"season={self.forecast.season} exceeds context={self.context}; use a longer context")
        if self.sequences.longest < self.context + self.forecast.horizon:
            raise DataError(
                f"{self.sequences.location}: no series has the {self.context} + {self.forecast.horizon} time steps of "
                f"context and horizon (the longest has {self.sequences.longest}); use a shorter context or horizon"
            )

    @property
    def task(self) -> Task:
        return self.forecast.task

    @cached_property
    def sequence_rows(self) -> SequenceRows:
        return SequenceRows(self.sequences, self.stride, self.context + self.forecast.horizon, self.context)

    @property
    def longest(self) -> int:
        return self.context

    @property
    def mean_length(self) -> float:
        return self.context

    def lengths(self, shard: int, start: int, stop: int) -> IntArray:
        return np.full(stop - start, self.context)

    def read_parts(self, step_ranges: Sequence[StepRange], num_steps: int, *, inputs: bool, targets: bool) -> Payload:
        """Return the windows, and the targets of their time steps."""
        # Nothing before the window is read: a seasonal target must not refer to a value that the network hasn't seen.
        windows = self._read_values(step_ranges)
        x = pad([self.forecast.inputs(values, 0, self.context) for values in windows], num_steps, 0) if inputs else None
        if not targets:
            return x, None
        window_targets = [self.forecast.targets(values, 0, self.context) for values in windows]
        if not self.every_step:
            for steps in window_targets:
                steps[:-1] = np.nan
        return x, pad(window_targets, num_steps, np.nan)

    def read_windows(self, rows: Sequence[RowId]) -> list[tuple[int, int, NDArray[Any]]]:
        """Return (series index, index of the context's last time step, values with the horizon) for each window."""
        series_before = [0, *accumulate(self.sequences.shard_sizes)]
        windows = []
        all_values = self._read_values(self.sequence_rows.step_ranges(rows))
        for (shard, index), values in zip(rows, all_values, strict=True):
            series, number = self.sequence_rows.locate(shard, index)
            windows.append((series_before[shard] + series, number * self.stride + self.context - 1, values))
        return windows

    def _read_values(self, step_ranges: Sequence[StepRange]) -> list[NDArray[Any]]:
        horizon = self.forecast.horizon
        return self.sequences.read([StepRange(shard, start, stop + horizon) for shard, start, stop in step_ranges])


def pad_next_tokens(rows: Sequence[NDArray[Any]], num_steps: int, *, inputs: bool, targets: bool) -> Payload:
    """Return rows of tokens without their last token as inputs, and without their first as targets."""
    x = pad([row[:-1] for row in rows], num_steps, 0) if inputs else None
    return x, (pad([row[1:] for row in rows], num_steps, IGNORE_INDEX) if targets else None)


def pad(rows: Sequence[NDArray[Any]], num_steps: int, value: float) -> Tensor:
    """Return rows of different lengths as one tensor `[num_steps, rows, ...]`, padded with `value`.

    Integers become int64; floats keep their dtype, but half precision becomes float32.
    """
    if not rows:
        return torch.full((num_steps, 0), value)
    dtype = np.result_type(rows[0].dtype, np.float32) if rows[0].dtype.kind == "f" else np.dtype(np.int64)
    padded = np.full((num_steps, len(rows), *rows[0].shape[1:]), value, dtype)
    for index, row in enumerate(rows):
        padded[: len(row), index] = row
    return torch.from_numpy(padded)
