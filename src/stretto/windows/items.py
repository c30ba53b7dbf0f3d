"""Items: what a row of a batch is made from: a labeled sequence, a sequence to continue, or a stretch of a series."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.base.errors import DataError
from stretto.base.task import Task
from stretto.base.window import IGNORE_INDEX
from stretto.store.sequences import Channels, IntArray, Sequences, StepRange, Tokens
from stretto.windows.forecast import Forecast

RowId = tuple[int, int]
"""A row of a batch by its shard and its number there."""


class Items(Protocol):
    """Rows of unequal length, and their payload."""

    @property
    def sequences(self) -> Sequences: ...
    @property
    def task(self) -> Task: ...
    @property
    def shard_sizes(self) -> Sequence[int]: ...
    @property
    def longest(self) -> int: ...
    @property
    def mean_length(self) -> float: ...
    def lengths(self, shard: int, start: int, stop: int) -> IntArray: ...
    def read(self, rows: Sequence[RowId], num_steps: int, *, inputs: bool, targets: bool) -> "Payload":
        """Return inputs and targets of some rows, time-major, padded to `num_steps`; those not asked for are none."""
        ...


Payload = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True)
class UnlabeledItems:
    """Each sequence is a row, and what is asked of it is not in the data."""

    sequences: Sequences
    masks: bool = False  # of channels: one more input for each, is its value there?

    @cached_property
    def scale(self) -> Forecast | None:
        """How channels become inputs; tokens are inputs as they are."""
        is_scaled = isinstance(self.sequences.fields.values, Channels)
        return Forecast.from_sequences(self.sequences, masks=self.masks) if is_scaled else None

    def inputs(self, places: Sequence[StepRange], num_steps: int) -> Tensor:
        """Return the sequences, time-major, padded to `num_steps`."""
        read, scale = self.sequences.read(places), self.scale
        return pad(read if scale is None else [scale.inputs(steps) for steps in read], num_steps, 0)


@dataclass(frozen=True)
class LabeledItems:
    """Each sequence is a row, asked for its label at its last step."""

    sequences: Sequences
    masks: bool = False  # of channels: one more input for each, is its value there?

    def __post_init__(self) -> None:
        if self.sequences.fields.labels is None:
            raise DataError(f"{self.sequences.location} has no labels; prepare it with --label")

    @property
    def task(self) -> Task:
        values, labels = self.sequences.fields.values, self.sequences.fields.labels
        assert labels is not None
        num_outputs = len(labels.names)
        if isinstance(values, Tokens):
            return Task("tokens", values.num_tokens, "labels", num_outputs)
        scale = self._unlabeled.scale
        assert scale is not None
        return replace(scale.task, targets="labels", num_outputs=num_outputs)

    @cached_property
    def _unlabeled(self) -> UnlabeledItems:
        return UnlabeledItems(self.sequences, self.masks)

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
        return np.diff(self.sequences.ends(shard, start, stop))

    def read(self, rows: Sequence[RowId], num_steps: int, *, inputs: bool, targets: bool) -> Payload:
        """Return the sequences, and their labels where each of them ends."""
        places = self.sequences.step_ranges(rows)
        x = self._unlabeled.inputs(places, num_steps) if inputs else None
        if not targets:
            return x, None
        asked = torch.full((num_steps, len(rows)), IGNORE_INDEX)
        lasts = torch.tensor([place.stop - place.start - 1 for place in places], dtype=torch.int64)
        asked[lasts, torch.arange(len(rows))] = torch.from_numpy(self.sequences.read_labels(rows))
        return x, asked


@dataclass(frozen=True)
class NextTokenItems:
    """Each sequence of tokens is a row, asked at each step for the token that comes next."""

    sequences: Sequences

    def __post_init__(self) -> None:
        if self.sequences.fields.values.type != "tokens":
            raise DataError(f"{self.sequences.location} holds channels, not tokens; use feed='lanes' or 'forecast'")
        if self.longest < 1:
            raise DataError(
                f"{self.sequences.location} has no sequence of two tokens, so nothing follows anything; give others"
            )

    @property
    def task(self) -> Task:
        values = self.sequences.fields.values
        assert isinstance(values, Tokens)
        return Task.language(values.num_tokens)

    @property
    def shard_sizes(self) -> Sequence[int]:
        return self.sequences.shard_sizes

    @property
    def longest(self) -> int:
        return self.sequences.longest - 1

    @property
    def mean_length(self) -> float:
        return self.sequences.mean_length

    def lengths(self, shard: int, start: int, stop: int) -> IntArray:
        return np.diff(self.sequences.ends(shard, start, stop)) - 1

    def read(self, rows: Sequence[RowId], num_steps: int, *, inputs: bool, targets: bool) -> Payload:
        """Return the sequences without their last token, and without their first."""
        places = self.sequences.step_ranges(rows)
        read = self.sequences.read(places)
        x = pad([tokens[:-1] for tokens in read], num_steps, 0) if inputs else None
        return x, pad([tokens[1:] for tokens in read], num_steps, IGNORE_INDEX) if targets else None


@dataclass(frozen=True)
class SlidingWindows:
    """Each row is a stretch of a series, `context` steps long and one every `stride` steps, asked for what follows.

    Only the last step of the context is asked, or every step where `every_step` is set.
    """

    sequences: Sequences
    forecast: Forecast
    context: int
    stride: int = 1
    every_step: bool = False

    def __post_init__(self) -> None:
        if min(self.context, self.stride) < 1:
            raise DataError(f"context={self.context} and stride={self.stride} must both be at least 1")
        if self.forecast.season > self.context:
            raise DataError(
                f"season={self.forecast.season} exceeds context={self.context}; a stretch must hold a whole "
                "season, so that the network has seen what it is compared with"
            )
        if not sum(self.shard_sizes):
            raise DataError(
                f"{self.sequences.location}: no series has the {self.context} + {self.forecast.horizon} steps of "
                f"context and horizon (the longest has {self.sequences.longest}); shorten them"
            )

    @property
    def task(self) -> Task:
        return self.forecast.task

    @cached_property
    def _starts(self) -> list[tuple[IntArray, IntArray]]:
        """Of each shard: where its series start, and how many stretches lie before each."""
        found = []
        for shard, size in enumerate(self.sequences.shard_sizes):
            ends = self.sequences.ends(shard, 0, size)
            room = np.diff(ends) - self.context - self.forecast.horizon
            counts = np.where(room < 0, 0, room // self.stride + 1)
            found.append((ends[:-1], np.concatenate([[0], counts.cumsum()])))
        return found

    @cached_property
    def shard_sizes(self) -> Sequence[int]:
        return [int(before[-1]) for _, before in self._starts]

    @property
    def longest(self) -> int:
        return self.context

    @property
    def mean_length(self) -> float:
        return self.context

    def lengths(self, shard: int, start: int, stop: int) -> IntArray:
        return np.full(stop - start, self.context)

    def read(self, rows: Sequence[RowId], num_steps: int, *, inputs: bool, targets: bool) -> Payload:
        """Return the stretches, and what follows them."""
        # Nothing before the stretch: a difference to what the network has not seen could only be guessed.
        read = self.sequences.read([self._range(*row) for row in rows])
        x = stack([self.forecast.inputs(values[: self.context]) for values in read]) if inputs else None
        if not targets:
            return x, None
        asked = [self.forecast.targets(values, 0, self.context) for values in read]
        if not self.every_step:
            for steps in asked:
                steps[:-1] = np.nan
        return x, stack(asked)

    def read_windows(self, rows: Sequence[RowId]) -> list[tuple[int, int, NDArray[Any]]]:
        """Return of each stretch its series, the last step of its context there, and its values with what follows."""
        before = [0, *accumulate(self.sequences.shard_sizes)]
        found = []
        read = self.sequences.read([self._range(*row) for row in rows])
        for (shard, number), values in zip(rows, read, strict=True):
            series, start = self._find(shard, number)
            step = start - int(self._starts[shard][0][series]) + self.context - 1
            found.append((before[shard] + series, step, values))
        return found

    def _range(self, shard: int, number: int) -> StepRange:
        _, start = self._find(shard, number)
        return StepRange(shard, start, start + self.context + self.forecast.horizon)

    def _find(self, shard: int, number: int) -> tuple[int, int]:
        """The series of a stretch, by its number in the shard, and where the stretch starts there."""
        starts, before = self._starts[shard]
        series = int(np.searchsorted(before, number, side="right")) - 1
        return series, int(starts[series]) + (number - int(before[series])) * self.stride


def pad(rows: Sequence[NDArray[Any]], num_steps: int, filling: float) -> Tensor:
    """Return rows of unequal length as one tensor `[time, batch, ...]`; whole numbers become int64."""
    if not rows:
        return torch.full((num_steps, 0), filling)
    dtype = np.float32 if rows[0].dtype.kind == "f" else np.int64
    padded = np.full((num_steps, len(rows), *rows[0].shape[1:]), filling, dtype)
    for index, row in enumerate(rows):
        padded[: len(row), index] = row
    return torch.from_numpy(padded)


def stack(rows: Sequence[NDArray[Any]]) -> Tensor:
    """Return rows of equal length as one tensor `[time, batch, ...]`."""
    return torch.from_numpy(np.stack(rows, axis=1))
