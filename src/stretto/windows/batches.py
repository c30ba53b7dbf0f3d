"""Batches: items of different lengths in padded batches, each item once per epoch, no state between batches."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

from stretto.base.errors import DataError
from stretto.base.position import Position
from stretto.base.task import Task, has_own_length
from stretto.base.window import IGNORE_INDEX, Window
from stretto.store.sequences import IntArray, Sequences, StepRange
from stretto.windows.batch_order import BatchLimits, BatchOrder
from stretto.windows.batch_sizes import arrange_batches, has_parts
from stretto.windows.items import Items, Payload, SlidingWindows
from stretto.windows.sections import Division, SectionShare
from stretto.windows.share import WHOLE, Share, take_share
from stretto.windows.shuffle_pools import RowTable

_SECTION_BITS = 32  # row r of section s has number s * 2**32 + r, whatever the other sections hold


@dataclass(frozen=True)
class Batches:
    """Items in global batches of at most `budget` time steps, padding included, split among replicas.

    The global batch, and so the gradient, is a function of seed and position, never of the number of replicas. A large
    store is cut into sections; each has its part of every batch, and of the budget, and is read by few replicas only.
    """

    is_stateful = False  # every row starts from the initial state
    lanes = 0  # no row continues in the next batch; `Window.lanes` are row numbers
    lane_indices = range(0)
    num_windows = None  # known only after a whole epoch is packed

    items: Items
    budget: int | None = None  # maximum of rows x time steps of the longest row, per global batch; None: no limit
    max_rows: int | None = None  # maximum number of rows, per global batch; None: no limit
    row_multiple: int = 8  # with `budget`: more rows are rounded down to a multiple, except in a pool's last batch
    seed: int = 1
    own_share: Share | None = None  # this replica's share; None: all rows

    def __post_init__(self) -> None:
        if isinstance(self.items, Sequences):
            raise DataError("items is a Sequences; wrap it in LabeledItems, NextTokenItems or SlidingWindows")
        if not isinstance(self.items, Items):
            raise DataError(
                f"items is an object of type {type(self.items).__name__}; make them with stretto.data.from_arrays, "
                "from_dataset or from_table, or subclass stretto.data.Items"
            )
        if self.budget is None and self.max_rows is None:
            raise DataError("Batches have no size; set budget to a number of time steps, or max_rows to one of rows")
        if self.budget is not None and self.items.longest > self.limits.budget:
            if isinstance(self.items, SlidingWindows):
                problem = f"context={self.items.context:,} exceeds data.budget={self.budget:,}"
                raise DataError(f"{problem}; raise the budget, or use a shorter context")
            problem = f"has {self.items.longest:,} time steps, more than data.budget={self.budget:,}"
            remedy = "raise the budget, or split long sequences before you prepare them"
            shard, index = self.items.find_longest()
            raise DataError(f"{self.items.location}: sequence {index:,} of shard {shard} {problem}; {remedy}")

    def share(self, index: int, count: int, min_rows: int = 1) -> Self:
        """Return the share of replica `index` of `count`; blank rows fill its batches up to `min_rows` rows."""
        return replace(self, own_share=take_share(self.own_share, index, count, min_rows))

    @cached_property
    def limits(self) -> BatchLimits:
        if self.budget is not None:
            # A row has a time step at least.
            max_rows = self.budget if self.max_rows is None else self.max_rows
            return BatchLimits(self.budget, max_rows, self.row_multiple)
        assert self.max_rows is not None, "__post_init__ checks"
        # `max_rows` is what a user calls the batch size.
        return BatchLimits(max(1, self.items.longest) * self.max_rows, self.max_rows, row_multiple=1)

    @cached_property
    def _global_order(self) -> BatchOrder:
        return arrange_batches(self.items, self.limits, self.seed, has_budget=self.budget is not None)

    @cached_property
    def _section_shares(self) -> list[SectionShare]:
        share = self.own_share or WHOLE
        return Division(self._global_order.pools.num_sections, share.count).share(share.index)

    @cached_property
    def order(self) -> BatchOrder:
        """The order of batches; only the sections of this share are read and packed."""
        first, last = self._section_shares[0].section, self._section_shares[-1].section
        return replace(self._global_order, own_sections=range(first, last + 1))

    def __str__(self) -> str:
        sizes = [] if self.budget is None else [f"{self.budget:,} time steps"]
        # More rows than time steps are no limit.
        if self.max_rows is not None and (self.budget is None or self.max_rows < self.budget):
            sizes.append(f"{self.max_rows:,} rows")
        if has_parts(self.items) and not self.items.sequence_rows.is_counted:
            num_rows = f"about {self.items.sequence_rows.approximate_count:,}"
        else:
            num_rows = f"{self.num_rows:,}"
        return f"{num_rows} rows in batches of at most {' and '.join(sizes)}"

    def __repr__(self) -> str:
        return f"<Batches: {self}>"

    @property
    def num_rows(self) -> int:
        """The number of rows in an epoch."""
        return sum(self.items.shard_sizes)

    def has_rows(self, count: int) -> bool:
        """Return whether an epoch has `count` rows or more; unlike `num_rows`, it is fast for parts of sequences."""
        return self.items.sequence_rows.has_rows(count) if has_parts(self.items) else self.num_rows >= count

    @property
    def task(self) -> Task:
        return self.items.task

    @property
    def bytes_per_token(self) -> float | None:
        return self.items.bytes_per_token

    def next_position(self, position: Position) -> Position:
        """Return the position of the batch after the one at `position`."""
        return self.order.next_position(position)

    def fraction(self, position: Position) -> float:
        """Return approximately what fraction of the epoch lies before a position."""
        return self.order.fraction(position)

    def read(self, position: Position, *, inputs: bool = True, targets: bool = True) -> Window:
        """Return this share of the batch at a position, longest row first.

        `inputs=False` or `targets=False` skips what a stage does not use; lengths and row numbers are always returned.
        """
        share = self.own_share or WHOLE
        rows, numbers = self._rows(position)
        num_blank = max(share.min_rows - len(numbers), 0)  # so that each micro-batch has a row
        lengths = np.concatenate([rows.lengths, np.zeros(num_blank, np.int64)])
        # The longest row of this share: windows of different shares may have different numbers of time steps.
        num_steps = max(1, int(lengths[0]))
        # Blank rows are numbered after all rows of the global batch, with different numbers in each share.
        first_blank = (self.order.pools.num_sections << _SECTION_BITS) + share.index * share.min_rows
        x, target = None, None
        if inputs or targets:
            # A blank row takes its shape and dtype from another row; this share may have none.
            like = rows.take(slice(1)) if len(rows.lengths) else self.order.any_row(position)
            x, target = self._payload(rows, like, num_blank, num_steps, inputs, targets)
        return Window(
            num_steps=num_steps,
            lanes=torch.from_numpy(np.concatenate([numbers, first_blank + np.arange(num_blank)])),
            lengths=torch.from_numpy(lengths),
            fresh=torch.ones(len(lengths), dtype=torch.bool),
            inputs=x,
            targets=target,
        )

    def _rows(self, position: Position) -> tuple[RowTable, IntArray]:
        """Return this share's rows of a batch, longest first, and their numbers, which are unique in the batch."""
        tables, numbers = [], []
        for part, section in zip(self.order.parts(position), self._section_shares, strict=True):
            indices = section.rows(len(part.lengths))
            tables.append(part.take(indices))
            numbers.append((section.section << _SECTION_BITS) + indices)
        rows = RowTable.concatenate(tables)
        order = (-rows.lengths).argsort(kind="stable")
        return rows.take(order), np.concatenate(numbers)[order]

    def _payload(
        self, rows: RowTable, like: RowTable, num_blank: int, num_steps: int, inputs: bool, targets: bool
    ) -> Payload:
        """Return the inputs and targets of `rows`, and of `num_blank` blank rows after them that are as in `like`."""
        x, target = None, None
        if len(rows.lengths):
            x, target = self._read_rows(rows, num_steps, inputs, targets)
            self._check_payload("inputs", x if inputs else None, num_steps, len(rows.lengths))
            target_steps = len(target) if target is not None and has_own_length(self.task.targets) else num_steps
            self._check_payload("targets", target if targets else None, target_steps, len(rows.lengths))
        if num_blank:
            like_x, like_target = self._read_rows(like, max(1, int(like.lengths[0])), inputs, targets)
            x = _add_blank(x, like_x, num_blank, num_steps, fill=0)
            target = _add_blank(target, like_target, num_blank, num_steps, fill=None)
        return x, target

    def _read_rows(self, rows: RowTable, num_steps: int, inputs: bool, targets: bool) -> Payload:
        if not has_parts(self.items):
            return self.items.read(rows.row_ids(), num_steps, inputs=inputs, targets=targets)
        columns = zip(rows.shards.tolist(), rows.indices.tolist(), rows.lengths.tolist(), strict=True)
        parts = [StepRange(shard, start, start + length) for shard, start, length in columns]
        return self.items.read_parts(parts, num_steps, inputs=inputs, targets=targets)

    def _check_payload(self, name: str, tensor: Tensor | None, num_steps: int, num_rows: int) -> None:
        """Raise if what a user's Items returned does not have the shape of the batch."""
        if tensor is not None and tensor.shape[:2] != (num_steps, num_rows):
            raise DataError(
                f"{type(self.items).__name__}.read returned {name} of shape {list(tensor.shape)}; return "
                f"[{num_steps}, {num_rows}, ...]: time steps, then rows"
            )


def _add_blank(
    tensor: Tensor | None, like: Tensor | None, num_blank: int, num_steps: int, fill: int | None
) -> Tensor | None:
    """Append blank rows shaped like a row of `like`, filled with `fill` or, if that is None, with missing targets."""
    if like is None:
        return None
    missing = torch.nan if like.is_floating_point() else IGNORE_INDEX
    length = num_steps if tensor is None else len(tensor)  # targets may have a length of their own
    blank = like.new_full((length, num_blank, *like.shape[2:]), missing if fill is None else fill)
    return blank if tensor is None else torch.cat([tensor, blank], dim=1)
