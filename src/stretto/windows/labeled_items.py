"""LabeledItems: sequences of a store with the targets that the store has, classes or values, per row or time step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import DataError
from stretto.base.task import Task, is_per_step
from stretto.store.sequences import StepRange, StoredTargets, TargetValues, Tokens
from stretto.windows.items import InputItems, Items, PartItems, Payload, RowId
from stretto.windows.row_targets import targets_tensor
from stretto.windows.sequence_rows import SequenceRows


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
        arrays = self.read_targets(rows) if targets else None
        return self._payload(self.step_ranges(rows), arrays, num_steps, inputs=inputs)

    def _payload(
        self, step_ranges: Sequence[StepRange], targets: Sequence[NDArray[Any]] | None, num_steps: int, *, inputs: bool
    ) -> Payload:
        """Return the inputs in some ranges, unless they are switched off, and tensors of `targets` as in the store."""
        x = self.inputs(step_ranges, num_steps) if inputs else None
        if targets is None:
            return x, None
        if self.scale and isinstance(self.stored, TargetValues):
            targets = [scale_targets(self.stored, values) for values in targets]
        lengths = [steps.stop - steps.start for steps in step_ranges]
        return x, targets_tensor(self.stored.kind, targets, lengths, num_steps)


@dataclass(frozen=True)
class CutLabeledItems(PartItems, LabeledItems):
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
    def sequence_rows(self) -> SequenceRows:
        return SequenceRows(self.sequences, self.context, max_steps=self.context)

    @property
    def longest(self) -> int:
        return min(self.context, self.sequences.longest)

    @cached_property
    def mean_length(self) -> float:
        return self.sequences.num_steps / self.sequence_rows.approximate_count

    def step_ranges(self, rows: Sequence[RowId]) -> list[StepRange]:
        return self.sequence_rows.step_ranges(rows)

    def read_parts(self, step_ranges: Sequence[StepRange], num_steps: int, *, inputs: bool, targets: bool) -> Payload:
        arrays = self.sequences.read_step_targets(step_ranges) if targets else None
        return self._payload(step_ranges, arrays, num_steps, inputs=inputs)


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
