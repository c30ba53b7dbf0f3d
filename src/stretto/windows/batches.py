"""Batches: sequences of unequal length as windows that all start fresh, each sequence once an epoch."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

from stretto.base.errors import DataError
from stretto.base.position import Position
from stretto.base.task import Task
from stretto.base.window import IGNORE_INDEX, Window
from stretto.store.sequences import Sequences
from stretto.windows.batch_order import BatchLimits, BatchOrder, assign_rows
from stretto.windows.items import Items, Payload
from stretto.windows.shuffle_pools import RowTable, ShufflePools

# A pool is worth about so many batches: lengths in a batch are then within some percent of each other.
_BATCHES_PER_POOL = 64
# Large batches are alike in length with fewer of them; a pool is planned at once, so it must not grow with the world.
_ROWS_PER_POOL = 1 << 18
_MIN_BATCHES_PER_POOL = 4


@dataclass(frozen=True)
class Batches:
    """Rows packed into global batches under a budget, dealt to replicas.

    The global batch, and so the gradient, is a function of seed, epoch and position: never of the number of replicas.
    """

    is_stateful = False  # every row starts fresh
    lanes = 0
    lane_indices = range(0)

    items: Items
    budget: int  # steps of a global batch, when its rows are padded to its longest
    rows: int = 1 << 20  # of a global batch, at most
    row_multiple: int = 8
    seed: int = 1
    index: int = 0
    count: int = 1
    min_rows: int = 1  # rows that a share has at least, blank ones if need be

    def __post_init__(self) -> None:
        if isinstance(self.items, Sequences):
            raise DataError(
                "batches are made of items; wrap the sequences in LabeledItems, NextTokenItems or SlidingWindows"
            )
        if self.items.longest > self.limits.budget:
            raise DataError(
                f"{self._find_longest()} has {self.items.longest:,} steps, more than data.budget={self.budget:,}; "
                "raise the budget, or cut long sequences before you prepare them"
            )

    def share(self, index: int, count: int, min_rows: int = 1) -> Self:
        """Return part `index` of `count` of each batch, with at least `min_rows` rows in each share."""
        if not 0 <= index < count:
            raise DataError(f"share {index} of {count} is not there; count from 0")
        return replace(self, index=index, count=count, min_rows=min_rows)

    @cached_property
    def limits(self) -> BatchLimits:
        return BatchLimits(self.budget, self.rows, self.row_multiple)

    @cached_property
    def order(self) -> BatchOrder:
        num_rows = int(min(self.budget / max(self.items.mean_length, 1), self.rows)) + 1
        pool_rows = min(_BATCHES_PER_POOL * num_rows, max(_ROWS_PER_POOL, _MIN_BATCHES_PER_POOL * num_rows))
        return BatchOrder(ShufflePools(self.items, self.seed, pool_rows), self.limits)

    def __str__(self) -> str:
        return f"{self.num_rows:,} rows in batches of at most {self.budget:,} steps"

    @property
    def num_rows(self) -> int:
        """How many rows an epoch has."""
        return sum(self.items.shard_sizes)

    @property
    def task(self) -> Task:
        return self.items.task

    @property
    def num_windows(self) -> None:
        """Not known before all of an epoch is packed, which nobody should wait for."""
        return

    @property
    def bytes_per_token(self) -> float | None:
        return self.items.sequences.bytes_per_token

    def next_position(self, position: Position) -> Position:
        """Return the position that follows."""
        return self.order.next_position(position)

    def fraction(self, position: Position) -> float:
        """Return how much of its epoch lies before a position, about."""
        return self.order.fraction(position)

    def read(self, position: Position, *, inputs: bool = True, targets: bool = True) -> Window:
        """Return this share of the batch at a position; its longest row comes first.

        Inputs or targets can be left out where they are not used; who is in the window is always there.
        """
        batch = self.order.batch(position)
        dealt = assign_rows(len(batch.lengths), self.index, self.count)
        rows = batch.take(dealt)
        num_blank = max(self.min_rows - len(dealt), 0)
        lengths = np.concatenate([rows.lengths, np.zeros(num_blank, np.int64)])
        # Of the whole batch, not of this share: every share sees windows of the same shape.
        num_steps = max(1, int(batch.lengths[0]))
        # Blank rows have places of their own, after all others.
        blanks = len(batch.lengths) + self.index * self.min_rows + np.arange(num_blank)
        x, asked = self._payload(rows, num_blank, num_steps, inputs, targets, batch)
        return Window(
            num_steps=num_steps,
            lanes=torch.from_numpy(np.concatenate([dealt, blanks])),
            lengths=torch.from_numpy(lengths),
            fresh=torch.ones(len(lengths), dtype=torch.bool),
            inputs=x,
            targets=asked,
        )

    def _payload(
        self, rows: RowTable, num_blank: int, num_steps: int, inputs: bool, targets: bool, batch: RowTable
    ) -> Payload:
        if not (inputs or targets):
            return None, None
        x, asked = None, None
        if len(rows.lengths):
            x, asked = self.items.read(rows.row_ids(), num_steps, inputs=inputs, targets=targets)
        if num_blank:
            # Another row of the batch tells the shape of one that is not there.
            first = batch.take(slice(1)).row_ids()
            other = self.items.read(first, num_steps, inputs=inputs, targets=targets)
            x = _add_blank(x, other[0], num_blank, num_steps, fill=0)
            asked = _add_blank(asked, other[1], num_blank, num_steps, fill=None)
        return x, asked

    def _find_longest(self) -> str:
        longest, sequences = self.items.longest, self.items.sequences
        for shard, size in enumerate(self.items.shard_sizes):
            if sequences.fields.shards[shard].longest < sequences.longest:
                continue
            for start in range(0, size, 1 << 16):
                found = np.flatnonzero(self.items.lengths(shard, start, min(size, start + (1 << 16))) == longest)
                if len(found):
                    return f"{self.items.sequences.location}: sequence {start + found[0]:,} of shard {shard}"
        return self.items.sequences.location


def _add_blank(
    tensor: Tensor | None, like: Tensor | None, num_blank: int, num_steps: int, fill: int | None
) -> Tensor | None:
    """Add rows that hold `fill`; in targets, what says that nothing is asked."""
    if like is None:
        return None
    not_asked = torch.nan if like.is_floating_point() else IGNORE_INDEX
    filling = not_asked if fill is None else fill
    blank = like.new_full((num_steps, num_blank, *like.shape[2:]), filling)
    return blank if tensor is None else torch.cat([tensor, blank], dim=1)
