"""DocumentLanes: sequences laid into lanes, one after the other, with state carried through each of them.

    pool      |-------doc 0-------|--doc 1--|------------doc 2------------|---doc 3---|      in windows, end to end,
    lane 0    |-------doc 0-------|--doc                                                    cut into lanes
    lane 1    1--|------------doc 2---
    lane 2    ---------|---doc 3---|

A window holds steps of one document: one that ends within it leaves the rest of its row empty, and the next starts
fresh with the next window. A document that a lane's edge cuts goes on fresh in the next lane, once a lane and pool.
"""

from dataclasses import dataclass, replace
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
from stretto.store.lru_cache import LruCache
from stretto.store.sequences import IntArray, Sequences, StepRange, Tokens
from stretto.windows.forecast import Forecast
from stretto.windows.items import Payload, pad
from stretto.windows.lanes import check_share, fit_lanes
from stretto.windows.shuffle import permutation
from stretto.windows.shuffle_pools import RowTable, ShufflePools

# A lane goes through about so many windows of a pool: an edge that cuts a document is that rare.
_WINDOWS_PER_POOL = 256


@dataclass(frozen=True)
class DocumentLanes:
    """Documents or series in a fixed global number of lanes; window k+1 of a lane goes on where window k ended.

    Tokens are asked for the next token, channels for what `forecast` says. Each step but the last of a document is
    asked exactly once an epoch. Lanes know nothing of ranks: `share` hands out a part, and lane numbers stay global.
    """

    is_stateful = True  # rows go on from window to window

    sequences: Sequences
    lanes: int
    window: int
    forecast: Forecast | None = None
    seed: int = 1
    first: int = 0
    stop: int | None = None  # none: up to the last lane

    def __post_init__(self) -> None:
        if self.lanes < 1 or self.window < 1:
            raise DataError(f"lanes={self.lanes} and window={self.window} must both be at least 1")
        if (self.sequences.fields.values.type == "channels") != (self.forecast is not None):
            raise DataError(f"{self.sequences.location}: channels need a forecast, and tokens must not have one")
        if self.sequences.longest < 2:
            raise DataError(
                f"{self.sequences.location} has no sequence of two steps, so nothing follows anything; give others"
            )
        asked, there = self.lanes * self.window, self.sequences.num_steps
        if asked > there:
            raise DataError(
                f"lanes={self.lanes:,} x window={self.window:,} asks for {asked:,} steps at once, but "
                f"{self.sequences.location} has {there:,}; use fewer lanes, a shorter window or more data"
            )

    @cached_property
    def _arranged(self) -> LruCache[tuple[RowTable, IntArray]]:
        return LruCache(2)

    @classmethod
    def fitting(
        cls, sequences: Sequences, lanes: int, window: int, forecast: Forecast | None, seed: int, min_rows: int = 1
    ) -> Self:
        """Return at most that many lanes, but at least `min_rows`, of at most that window: as many as the steps fill."""
        return cls(sequences, *fit_lanes(sequences.num_steps, lanes, window, min_rows), forecast, seed)

    def share(self, index: int, count: int, min_rows: int = 1) -> Self:
        """Return part `index` of `count` of the lanes, each of at least `min_rows`; they differ by at most one lane."""
        check_share(self.lanes, index, count, min_rows)
        return replace(self, first=self.lanes * index // count, stop=self.lanes * (index + 1) // count)

    @property
    def lane_indices(self) -> range:
        """The global numbers of the lanes of this share."""
        return range(self.first, self.lanes if self.stop is None else self.stop)

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
    def num_windows(self) -> None:
        """Not known before all of an epoch is laid into lanes, which nobody should wait for."""
        return

    @property
    def bytes_per_token(self) -> float | None:
        return self.sequences.bytes_per_token

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        return self.sequences.shard_sizes

    def lengths(self, shard: int, start: int, stop: int) -> IntArray:
        """Return how many steps of each document are followed by another."""
        return np.diff(self.sequences.ends(shard, start, stop)) - 1

    @cached_property
    def pools(self) -> ShufflePools:
        num_rows = _WINDOWS_PER_POOL * self.lanes * self.window / self.sequences.mean_length
        return ShufflePools(self, self.seed, int(num_rows) + 1)

    def next_position(self, position: Position) -> Position:
        """Return the position that follows."""
        return self.pools.next_position(position, self._num_windows(position))

    def fraction(self, position: Position) -> float:
        """Return how much of its epoch lies before a position, about."""
        # A pool's start is known without laying it out.
        return self.pools.fraction(position, self._num_windows(position) if position.index else 1)

    def read(self, position: Position, *, inputs: bool = True, targets: bool = True) -> Window:
        """Return the window at a position.

        Inputs or targets can be left out where they are not used; who is in the window is always there.
        """
        documents, before = self._arrange(position.epoch, position.pool)
        if not 0 <= position.index < self._num_windows(position):
            raise DataError(f"{position} is not there: that pool has {self._num_windows(position)} windows")
        numbers, total = np.array(self.lane_indices), int(before[-1])
        windows = total * numbers // self.lanes + position.index
        is_there = windows < total * (numbers + 1) // self.lanes
        # A lane that has come to its end stays, with nothing in it.
        windows = np.where(is_there, windows, 0)
        which = np.minimum(np.searchsorted(before, windows, side="right"), len(documents.lengths)) - 1
        offsets = (windows - before[which]) * self.window
        lengths = np.where(is_there, np.minimum(documents.lengths[which] - offsets, self.window), 0)
        x, asked = None, None
        if inputs or targets:
            x, asked = self._payload(documents.take(which), offsets, lengths, inputs, targets)
        return Window(
            num_steps=self.window,
            lanes=torch.from_numpy(numbers),
            lengths=torch.from_numpy(lengths),
            fresh=torch.from_numpy((offsets == 0) | (position.index == 0)),
            inputs=x,
            targets=asked,
        )

    def _payload(self, rows: RowTable, offsets: IntArray, lengths: IntArray, inputs: bool, targets: bool) -> Payload:
        places = self.sequences.step_ranges(rows.row_ids())
        back = self.forecast.season if self.forecast else 0
        ahead = self.forecast.horizon if self.forecast else 1
        spans, starts = [], []
        for place, offset, length in zip(places, offsets.tolist(), lengths.tolist(), strict=True):
            start = max(0, offset - back)
            stop = min(offset + length + ahead, place.stop - place.start)
            spans.append(StepRange(place.shard, place.start + start, place.start + stop))
            starts.append(offset - start)
        read = list(zip(self.sequences.read(spans), starts, lengths.tolist(), strict=True))
        x = pad([self._inputs(*row) for row in read], self.window, 0) if inputs else None
        nothing = IGNORE_INDEX if self.forecast is None else np.nan
        return x, pad([self._targets(*row) for row in read], self.window, nothing) if targets else None

    def _inputs(self, values: NDArray[Any], start: int, length: int) -> NDArray[Any]:
        steps = values[start : start + length]
        return steps if self.forecast is None else self.forecast.inputs(steps)

    def _targets(self, values: NDArray[Any], start: int, length: int) -> NDArray[Any]:
        if self.forecast is None:
            return values[start + 1 : start + 1 + length]
        return self.forecast.targets(values, start, start + length)

    def _num_windows(self, position: Position) -> int:
        """How many windows a pool has: those of its longest lane."""
        _, before = self._arrange(position.epoch, position.pool)
        return max(1, -(-int(before[-1]) // self.lanes))

    def _arrange(self, epoch: int, pool: int) -> tuple[RowTable, IntArray]:
        """A pool's documents in random order, and how many windows lie before each."""
        return self._arranged.get((epoch, pool), lambda: self._arrange_pool(epoch, pool))

    def _arrange_pool(self, epoch: int, pool: int) -> tuple[RowTable, IntArray]:
        rows = self.pools.rows(epoch, pool)
        rows = rows.take(permutation(derive_key(self.seed, "epoch", epoch, "pool", pool), len(rows.lengths)))
        return rows, np.concatenate([[0], (-(-rows.lengths // self.window)).cumsum()])
