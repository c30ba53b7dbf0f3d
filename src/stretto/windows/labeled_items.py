"""LabeledItems: sequences of a store with the targets that the store has, classes or values, per row or time step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import DataError
from stretto.base.task import Task, is_per_step
from stretto.store.sequences import IntArray, StepRange, StoredTargets, TargetValues, Tokens
from stretto.windows.items import InputItems, Items, Payload, RowId
from stretto.windows.row_targets import targets_tensor


@dataclass(frozen=True)
class LabeledItems(InputItems, Items):
    """Each sequence is a row. Targets per row are at its last time step; values are scaled unless `scale` is False.

    If the store has a sequence of targets per row, they have a length of their own.
    """

    def __post_init__(self) -> None:
        if self.sequences.fields.targets is None:
            raise DataError(f"{self.sequences.location} has no targets; prepare it again with label or targets")

    @property
    def stored(self) -> StoredTargets:
        """What the store says about its targets."""
        targets = self.sequences.fields.targets
        assert targets is not None
        return targets

    @property
    def task(self) -> Task:
        values, kind, num_outputs = self.sequences.fields.values, self.stored.kind, len(self.stored.names)
        if isinstance(values, Tokens):
            return Task("tokens", values.num_tokens, kind, num_outputs)
        assert self.scaler is not None
        return replace(self.scaler.task, targets=kind, num_outputs=num_outputs)

    @property
    def labels(self) -> tuple[str, ...]:
        return () if isinstance(self.stored, TargetValues) else self.stored.names

    def step_ranges(self, rows: Sequence[RowId]) -> list[StepRange]:
        """Return the time steps of each row."""
        return self.sequences.step_ranges(rows)

    def read_targets(self, rows: Sequence[RowId]) -> list[NDArray[Any]]:
        """Return the targets of each row as they are in the store: classes, or values that are not scaled."""
        if self.stored.per_step:
            return self.sequences.read_step_targets(self.step_ranges(rows))
        return self.sequences.read_row_targets(rows)

    def read(self, rows: Sequence[RowId], num_steps: int, *, inputs: bool, targets: bool) -> Payload:
        """Return the sequences and their targets."""
        step_ranges = self.step_ranges(rows)
        x = self.inputs(step_ranges, num_steps) if inputs else None
        if not targets:
            return x, None
        arrays = self.read_targets(rows)
        if self.scale and isinstance(self.stored, TargetValues):
            arrays = [scale_targets(self.stored, values) for values in arrays]
        return x, targets_tensor(
            self.stored.kind, arrays, [steps.stop - steps.start for steps in step_ranges], num_steps
        )


@dataclass(frozen=True)
class CutLabeledItems(LabeledItems):
    """The same time steps in rows of at most `context`, each of which starts from the initial state."""

    context: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_per_step(self.stored.kind):
            raise DataError(
                f"context={self.context} would cut sequences that have one target each; leave it out, or use targets "
                "per time step"
            )

    @cached_property
    def _rows_by_shard(self) -> list[tuple[IntArray, IntArray]]:
        """For each shard: where each row starts, and where it ends."""
        shards = []
        for shard, size in enumerate(self.sequences.shard_sizes):
            boundaries = self.sequences.boundaries(shard, 0, size)
            counts = -(-np.diff(boundaries) // self.context)
            first_rows = np.repeat(counts.cumsum() - counts, counts)
            starts = np.repeat(boundaries[:-1], counts) + (np.arange(counts.sum()) - first_rows) * self.context
            shards.append((starts, np.minimum(starts + self.context, np.repeat(boundaries[1:], counts))))
        return shards

    @cached_property
    def shard_sizes(self) -> Sequence[int]:
        return [len(starts) for starts, _ in self._rows_by_shard]

    @property
    def longest(self) -> int:
        return min(self.context, self.sequences.longest)

    @property
    def mean_length(self) -> float:
        return self.sequences.num_steps / sum(self.shard_sizes)

    def lengths(self, shard: int, start: int, stop: int) -> IntArray:
        starts, stops = self._rows_by_shard[shard]
        return stops[start:stop] - starts[start:stop]

    def step_ranges(self, rows: Sequence[RowId]) -> list[StepRange]:
        ranges = [(shard, *(bounds[index] for bounds in self._rows_by_shard[shard])) for shard, index in rows]
        return [StepRange(shard, int(start), int(stop)) for shard, start, stop in ranges]


def scale_targets(targets: TargetValues, values: NDArray[Any]) -> NDArray[np.float32]:
    """Return values `[..., values]` as a network predicts them: with the mean and std of the training data."""
    mean, std = np.array(targets.mean, np.float32), np.array(targets.std, np.float32)
    scaled: NDArray[np.float32] = (values - mean) / std
    return scaled


def unscale_targets(targets: TargetValues, outputs: NDArray[Any]) -> NDArray[np.float32]:
    """Return outputs `[..., values]` in the units of the targets: the inverse of `scale_targets`."""
    mean, std = np.array(targets.mean, np.float32), np.array(targets.std, np.float32)
    values: NDArray[np.float32] = outputs * std + mean
    return values
