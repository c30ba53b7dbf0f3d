"""DocumentLanes: documents or series one after another in lanes; state is carried through each document.

    pool      |-------doc 0-------|--doc 1--|------------doc 2------------|---doc 3---|      cut into windows,
    lane 0    |-------doc 0-------|--doc                                                    then into lanes
    lane 1    1--|------------doc 2---
    lane 2    ---------|---doc 3---|

A row of a window is part of one document. If the document ends within the row, padding follows, and the next document
starts fresh in the next window. A document that is cut by the end of a lane restarts fresh in the next lane; this
happens at most once per lane and pool.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.base.errors import DataError
from stretto.base.keys import derive_key
from stretto.base.position import Position
from stretto.base.task import Task
from stretto.base.window import IGNORE_INDEX, Window
from stretto.store.lru_cache import LruCache, lru_cache_field
from stretto.store.sequences import IntArray, Sequences, StepRange, Tokens
from stretto.windows.forecast import ForecastTransform
from stretto.windows.items import Payload, pad
from stretto.windows.lanes import fit_lanes
from stretto.windows.share import DividedLanes, Share
from stretto.windows.shuffle import permutation
from stretto.windows.shuffle_pools import RowTable, ShufflePools

# The approximate number of windows per lane in a pool; in each pool, the end of a lane may cut one document.
_WINDOWS_PER_POOL = 256


@dataclass(frozen=True)
class DocumentLanes(DividedLanes):
    """Documents or series in a fixed global number of lanes; window k+1 of a lane continues where window k ended.

    The target of a token is the next token; targets of channels come from `forecast`. Each time step but the last of
    a document is an input exactly once per epoch. `share` returns the lanes of one replica; lane numbers stay global.
    """

    num_windows = None  # known only after a whole epoch is arranged in lanes

    sequences: Sequences
    lanes: int
    window: int
    forecast: ForecastTransform | None = None
    seed: int = 1
    own_share: Share | None = None  # None: all lanes, not divided among replicas
    _arranged: LruCache[tuple[RowTable, IntArray]] = lru_cache_field(2)  # by (epoch, pool)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.sequences.fields.values.type == "channels") != (self.forecast is not None):
            raise DataError(f"{self.sequences.location}: forecast is required for channels and not allowed for tokens")
        if self.sequences.longest < 2:
            problem = "has no sequence of two or more time steps, so there is nothing to predict"
            raise DataError(f"{self.sequences.location} {problem}; use longer sequences")
        needed, available = self.lanes * self.window, self.sequences.num_steps
        if needed > available:
            raise DataError(
                f"lanes={self.lanes:,} x window={self.window:,} needs {needed:,} time steps, but "
                f"{self.sequences.location} has {available:,}; use fewer lanes, a shorter window or more data"
            )

    @classmethod
    def fitting(
        cls,
        sequences: Sequences,
        lanes: int,
        window: int,
        forecast: ForecastTransform | None,
        seed: int,
        min_rows: int = 1,
    ) -> Self:
        """Return lanes that fit the data: `window` shrinks until `min_rows` lanes fit; then `lanes` shrinks."""
        return cls(sequences, *fit_lanes(sequences.num_steps, lanes, window, min_rows), forecast, seed)

    def __str__(self) -> str:
        return f"{self.sequences.num_sequences:,} sequences in {self.lanes:,} lanes x window {self.window:,}"

    @property
    def task(self) -> Task:
        values = self.sequences.fields.values
        if isinstance(values, Tokens):
            return Task.language(values.num_tokens)
        assert self.forecast is not None
        return self.forecast.task

    @property
    def bytes_per_token(self) -> float | None:
        return self.sequences.bytes_per_token

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        return self.sequences.shard_sizes

    def lengths(self, shard: int, start: int, stop: int) -> IntArray:
        """Return how many time steps of each document are inputs: all but the last. `ShufflePools` calls this."""
        return np.diff(self.sequences.boundaries(shard, start, stop)) - 1

    @cached_property
    def pools(self) -> ShufflePools:
        pool_rows = _WINDOWS_PER_POOL * self.lanes * self.window / self.sequences.mean_length
        return ShufflePools(self, self.seed, int(pool_rows) + 1)

    def next_position(self, position: Position) -> Position:
        """Return the position of the window after the one at `position`."""
        return self.pools.next_position(position, self._num_pool_windows(position))

    def fraction(self, position: Position) -> float:
        """Return approximately what fraction of the epoch lies before a position."""
        # At the start of a pool, its number of windows doesn't matter, so the pool is not arranged.
        return self.pools.fraction(position, self._num_pool_windows(position) if position.index else 1)

    def read(self, position: Position, *, inputs: bool = True, targets: bool = True) -> Window:
        """Return the window at a position.

        `inputs=False` or `targets=False` skips what a stage does not use; lengths and lane numbers are always returned.
        """
        documents, windows_before = self._arrange(position.epoch, position.pool)
        num_windows = self._num_pool_windows(position)
        if not 0 <= position.index < num_windows:
            raise DataError(f"{position} does not exist: that pool ends at window {num_windows - 1}")
        lanes, total = np.array(self.lane_indices), int(windows_before[-1])
        # Lane i has windows total * i // self.lanes up to total * (i + 1) // self.lanes of the pool.
        windows = total * lanes // self.lanes + position.index
        has_data = windows < total * (lanes + 1) // self.lanes
        # A lane that has ended keeps its row, with length 0.
        windows = np.where(has_data, windows, 0)
        # The document of each window. The minimum only matters for a pool without windows, where all lengths are 0.
        indices = np.minimum(np.searchsorted(windows_before, windows, side="right"), len(documents.lengths)) - 1
        offsets = (windows - windows_before[indices]) * self.window
        rows = documents.take(indices)
        lengths = np.where(has_data, np.minimum(rows.lengths - offsets, self.window), 0)
        x, target = self._payload(rows, offsets, lengths, inputs, targets) if inputs or targets else (None, None)
        return Window(
            num_steps=self.window,
            lanes=torch.from_numpy(lanes),
            lengths=torch.from_numpy(lengths),
            fresh=torch.from_numpy((offsets == 0) | (position.index == 0)),
            inputs=x,
            targets=target,
        )

    def _payload(self, rows: RowTable, offsets: IntArray, lengths: IntArray, inputs: bool, targets: bool) -> Payload:
        # The targets of a window look back by a season and ahead by the horizon.
        back = self.forecast.season if self.forecast else 0
        ahead = self.forecast.horizon if self.forecast else 1
        step_ranges, starts = [], []  # the time steps to read, and at which of them the window starts
        documents = self.sequences.step_ranges(rows.row_ids())
        for document, offset, length in zip(documents, offsets.tolist(), lengths.tolist(), strict=True):
            start = max(0, offset - back)
            stop = min(offset + length + ahead, document.stop - document.start)
            step_ranges.append(StepRange(document.shard, document.start + start, document.start + stop))
            starts.append(offset - start)
        rows_read = list(zip(self.sequences.read(step_ranges), starts, lengths.tolist(), strict=True))
        x = pad([self._inputs(*row) for row in rows_read], self.window, 0) if inputs else None
        no_target = IGNORE_INDEX if self.forecast is None else np.nan
        return x, (pad([self._targets(*row) for row in rows_read], self.window, no_target) if targets else None)

    def _inputs(self, values: NDArray[Any], start: int, length: int) -> NDArray[Any]:
        if self.forecast is None:
            return values[start : start + length]
        return self.forecast.inputs(values, start, start + length)

    def _targets(self, values: NDArray[Any], start: int, length: int) -> NDArray[Any]:
        if self.forecast is None:
            return values[start + 1 : start + 1 + length]
        return self.forecast.targets(values, start, start + length)

    def _num_pool_windows(self, position: Position) -> int:
        """Return the number of windows of the pool's longest lane; 1 (empty) if the pool has nothing to predict."""
        _, windows_before = self._arrange(position.epoch, position.pool)
        return max(1, -(-int(windows_before[-1]) // self.lanes))

    def _arrange(self, epoch: int, pool: int) -> tuple[RowTable, IntArray]:
        """Return a pool's documents in random order, and the number of windows before each, then the total."""
        return self._arranged.get((epoch, pool), lambda: self._arrange_pool(epoch, pool))

    def _arrange_pool(self, epoch: int, pool: int) -> tuple[RowTable, IntArray]:
        rows = self.pools.rows(epoch, pool)
        rows = rows.take(permutation(derive_key(self.seed, "epoch", epoch, "pool", pool), len(rows.lengths)))
        return rows, np.concatenate([[0], (-(-rows.lengths // self.window)).cumsum()])
