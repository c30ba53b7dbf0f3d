"""DocumentLanes: documents or series one after another in lanes; state is carried through each document.

    pool      |-------doc 0-------|--doc 1--|------------doc 2------------|---doc 3---|      cut into windows,
    lane 0    |-------doc 0-------|--doc                                                    then into lanes
    lane 1    1--|------------doc 2---
    lane 2    ---------|---doc 3---|

A row of a window is part of one document. If the document ends within the row, padding follows, and the next document
starts fresh in the next window. A document that is cut by the end of a lane restarts fresh in the next lane; this
happens at most once per lane and pool. In a large store, lanes are in sections, each with its own documents.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.base.errors import DataError
from stretto.base.position import Position
from stretto.base.task import Task
from stretto.base.window import IGNORE_INDEX, Window
from stretto.store.sequences import IntArray, Sequences, StepRange, Tokens
from stretto.windows.document_order import DocumentOrder
from stretto.windows.forecast import ForecastTransform
from stretto.windows.items import Payload, pad
from stretto.windows.lanes import fit_lanes
from stretto.windows.share import DividedLanes, Share
from stretto.windows.shuffle_pools import RowTable


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

    @cached_property
    def order(self) -> DocumentOrder:
        """The order of documents; only those of this share's lanes are read and arranged."""
        return DocumentOrder.arrange(self.sequences, self.lane_indices, self.lanes, self.window, self.seed)

    def next_position(self, position: Position) -> Position:
        """Return the position of the window after the one at `position`."""
        return self.order.next_position(position)

    def fraction(self, position: Position) -> float:
        """Return approximately what fraction of the epoch lies before a position."""
        return self.order.fraction(position)

    def read(self, position: Position, *, inputs: bool = True, targets: bool = True) -> Window:
        """Return the window at a position.

        `inputs=False` or `targets=False` skips what a stage does not use; lengths and lane numbers are always returned.
        """
        rows, offsets, lengths = self.order.windows(position)
        x, target = self._payload(rows, offsets, lengths, inputs, targets) if inputs or targets else (None, None)
        return Window(
            num_steps=self.window,
            lanes=torch.from_numpy(np.array(self.lane_indices)),
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
