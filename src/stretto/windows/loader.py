"""Loader: windows one after the other, read ahead by torch's own workers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, Self

from torch.utils.data import DataLoader, Dataset

from stretto.base.errors import DataError, StrettoError
from stretto.base.position import Position
from stretto.base.task import Task
from stretto.base.window import Window

# WindowSource that each worker has ready or under way.
_PREFETCH_FACTOR = 2


class WindowSource(Protocol):
    """Data as a trainer needs it: the window at any position is a pure function of that position."""

    @property
    def is_stateful(self) -> bool:
        """Do rows go on from window to window?"""
        ...

    @property
    def lanes(self) -> int:
        """How many rows of all replicas together go on from window to window; 0 if none do."""
        ...

    @property
    def lane_indices(self) -> range:
        """Which of them are in this share."""
        ...

    @property
    def num_windows(self) -> int | None:
        """How many windows an epoch has; none if that is not known before they are packed."""
        ...

    @property
    def bytes_per_token(self) -> float | None:
        """How much text a token stands for; none if there is no text."""
        ...

    @property
    def task(self) -> Task:
        """What goes in and what is asked."""
        ...

    def share(self, index: int, count: int, min_rows: int = 1) -> Self:
        """Return the part of replica `index` of `count`, with at least `min_rows` rows."""
        ...

    def next_position(self, position: Position) -> Position:
        """Return the position that follows."""
        ...

    def fraction(self, position: Position) -> float:
        """Return how much of its epoch lies before a position, about."""
        ...

    def read(self, position: Position, *, inputs: bool = True, targets: bool = True) -> Window:
        """Return the window at a position, with the payload that is asked for."""
        ...


def read_ahead(
    data: WindowSource,
    start: Position,
    *,
    inputs: bool = True,
    targets: bool = True,
    workers: int = 0,
    pin: bool = False,
) -> Iterator[tuple[Window, Position]]:
    """Return windows from `start` on, epoch after epoch without end, each with the position after it.

    Workers are processes that read ahead; how many there are changes nothing but the time it takes. `pin` lays windows
    into memory from which a GPU copies without waiting.
    """
    if workers < 0:
        raise DataError(f"workers={workers} must be at least 0")
    loader = DataLoader(
        _WindowDataset(data, inputs, targets),
        batch_size=None,
        sampler=_PositionSampler(data, start),
        num_workers=workers,
        prefetch_factor=_PREFETCH_FACTOR if workers else None,
        pin_memory=pin,
    )
    position = start
    for found in loader:
        if isinstance(found, StrettoError):
            raise found
        position = data.next_position(position)
        yield found, position


@dataclass(frozen=True)
class _PositionSampler:
    """The positions, one after the other."""

    data: WindowSource
    start: Position

    def __iter__(self) -> Iterator[Position]:
        position = self.start
        while True:
            yield position
            position = self.data.next_position(position)


@dataclass(frozen=True)
class _WindowDataset(Dataset[Window | StrettoError]):
    """What a worker does."""

    data: WindowSource
    inputs: bool
    targets: bool

    def __getitem__(self, position: Position) -> Window | StrettoError:
        try:
            return self.data.read(position, inputs=self.inputs, targets=self.targets)
        except StrettoError as error:
            # Handed on as it is: raised here, it would arrive with the worker's traceback in its text.
            return error
